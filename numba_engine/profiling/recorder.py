"""Recorder: a backend that lets another one work and notes what each op took.

Pass it to the forward in the backend's place. An op is only timed while it runs; what it moved and computed is worked
out afterwards, in ``take_step``, from the arguments it was called with, so that looking costs the step little.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median, quantiles
from typing import Any

import numpy as np

from numba_engine.backends.arrays import Batch, KVCacheLayer, Norm, Weight
from numba_engine.backends.base import OPS, Backend
from numba_engine.backends.delegating import DelegatingBackend, UnfusedBackend
from numba_engine.backends.instruments import CountedTraffic, TimeSource
from numba_engine.backends.layers import Attention, GatedMlp, Layer
from numba_engine.backends.ops import Op, Place
from numba_engine.backends.traffic import Traffic
from numba_engine.profiling.peaks import simulated_peaks
from numba_engine.profiling.report import (
    MemoryUse,
    OpCall,
    OpProfile,
    Peaks,
    ProfileSummary,
    StepProfile,
    idle_share,
    ops_by_name,
)

Clock = Callable[[], float]

_CALIBRATION_CALLS = 60
_CALIBRATION_BYTES = 2 << 20
"""Read before each: about what one op of a small model streams, and more than the caches next to a core hold."""


_Call = tuple[Op, int | None, tuple[Any, ...], float, float]
"""One recorded call: the op, its layer, what it was given, and when it began and ended by the host's clock."""

_AFTER_HOST = (Place.START, Place.DRAW)
"""Places of ops before which the host does other things than to call them."""


@dataclass(frozen=True, slots=True, eq=False)
class TimedCall:
    """One call of a step that was taken."""

    name: str
    layer: int | None
    args: tuple[Any, ...]
    start_s: float
    """Since the step began."""
    time_s: float
    num_launches: int
    traffic: Traffic
    counted: CountedTraffic | None = None

    @property
    def op(self) -> OpProfile:
        return _op([self])


class Recorder(DelegatingBackend):
    """Delegates every op to ``inner`` with a clock around it.

    A phase that ``inner`` fuses is recorded as one op; one that it leaves to the textbook, or every phase with
    ``fusion=False``, is composed here so that its ops are recorded one by one.

    Times of ops, by what ``inner`` has (``time_source`` says which):

    - a timer: the device's own, and the host does not wait between ops;
    - a counter: the device is simulated, so the times of ops and steps are predicted from their traffic by formula and
      ``peaks``, and what the device counted is noted beside it;
    - neither: the host's clock around the call and the wait for its end; calling the op counts to it, from where the
      one before it ended. ``overhead_s_per_call`` is what one recorded call costs beyond the op itself, measured at
      construction; ``StepProfile.overhead_s`` carries it, and op times do not contain it.

    With ``unprofiled_every=n``, every n-th decode step runs as it would without a recorder, so that the cost of looking
    is measured in the same run.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        fusion: bool = True,
        timeline: bool = False,
        unprofiled_every: int = 0,
        peaks: Peaks | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        super().__init__(inner)
        self._profiled = inner if fusion else UnfusedBackend(inner)
        self._clock = clock
        self._calls: list[_Call] = []
        self._layer: int | None = None
        self._recording = True
        self._waits = inner.num_threads == 0  # else ops are done when they return
        on_device = inner.counter is not None or inner.timer is not None
        self._timed = self._timed_on_device if on_device else self._timed_by_clock
        self._timeline = timeline
        self._unprofiled_every = unprofiled_every
        self._num_decode_steps = 0
        self._counted: list[CountedTraffic] = []
        self._known_traffic: dict[Any, Traffic] = {}
        self._inside_s, self.overhead_s_per_call = 0.0, 0.0
        if inner.counter is not None:
            self.time_source = TimeSource.SIMULATED
            self._peaks = peaks or simulated_peaks()
            self._unprofiled_every = 0  # a prediction costs what it predicts nothing
            inner.counter.start()
        elif inner.timer is not None:
            self.time_source = inner.timer.source
            inner.timer.start()
        else:
            self.time_source = TimeSource.HOST_CLOCK
            self._inside_s, self.overhead_s_per_call = self._calibrate()

    def close(self) -> None:
        """The last step was taken."""
        if self.inner.counter is not None:
            self.inner.counter.stop()
        if self.inner.timer is not None:
            self.inner.timer.stop()

    # ---- the record ------------------------------------------------------------------------------------------------

    def ops_for_step(self, *, is_decode: bool) -> Backend:
        """What the next step is to run on: this recorder, or, where it is that step's turn, one that does not look.

        ``is_decode``: it has no prompt tokens.
        """
        self._num_decode_steps += is_decode
        every = self._unprofiled_every
        self._recording = not (every and is_decode and self._num_decode_steps % every == 0)
        return self if self._recording else self._profiled

    def take_step(
        self, *, index: int, num_prefill_tokens: int, num_decode_tokens: int, num_seqs: int, time_s: float
    ) -> StepProfile:
        """What was recorded since the last call, as the profile of one step that took ``time_s`` in all.

        Call it before the arrays of the step's batch are used for the next one.
        """
        began_s = self._clock() - time_s
        calls = self._timed_calls(began_s)
        ops = _ops_by_name(calls)
        profile = StepProfile(
            index=index,
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_decode_tokens,
            num_seqs=num_seqs,
            time_s=sum(op.time_s for op in ops) if self.time_source is TimeSource.SIMULATED else time_s,
            ops=ops,
            overhead_s=self.overhead_s_per_call * len(calls),
            time_source=self.time_source,
            profiled=self._recording,
            launch_gap_s=self._gaps_s(calls),
            timeline=tuple(_as_bar(call) for call in calls) if self._timeline else (),
        )
        self._calls.clear()
        self._counted.clear()
        return profile

    def _timed_calls(self, began_s: float) -> list[TimedCall]:
        """Every call with its time and its traffic, in order."""
        if self.inner.counter is not None:
            return self._predicted_calls()
        if self.inner.timer is not None and self._recording:
            return self._calls_by_device(began_s)
        return self._calls_by_clock(began_s)

    def _calls_by_clock(self, began_s: float) -> list[TimedCall]:
        """Calling an op is part of its time: it begins where the one before it ended."""
        timed, previous_end_s = [], 0.0
        for (op, layer, args, called_s, end_s), traffic in zip(self._calls, self._traffic(), strict=True):
            if previous_end_s and op.place not in _AFTER_HOST:
                start_s, looking_s = previous_end_s, self.overhead_s_per_call
            else:
                start_s, looking_s = called_s, self._inside_s
            time_s = max(end_s - start_s - looking_s, 0.0)
            timed.append(TimedCall(op.name, layer, args, max(start_s - began_s, 0.0), time_s, 1, traffic))
            previous_end_s = end_s
        return timed

    def _calls_by_device(self, began_s: float) -> list[TimedCall]:
        assert self.inner.timer is not None
        times = self.inner.timer.take()
        assert len(times) == len(self._calls), "the timer saw other ops than the recorder"
        first_s = self._calls[0][3] - began_s if self._calls else 0.0
        return [
            TimedCall(op.name, layer, args, first_s + ran.start_s, ran.time_s, ran.num_launches, traffic)
            for (op, layer, args, _, _), ran, traffic in zip(self._calls, times, self._traffic(), strict=True)
        ]

    def _predicted_calls(self) -> list[TimedCall]:
        """One after the other: what launching takes, then the roofline. Activations are taken to stay in the caches."""
        timed, start_s = [], 0.0
        for (op, layer, args, _, _), traffic, counted in zip(self._calls, self._traffic(), self._counted, strict=True):
            from_memory = traffic.weight_bytes + traffic.kv_read_bytes + traffic.kv_written_bytes
            time_s = counted.num_launches * self._peaks.launch_s + self._peaks.least_time_s(from_memory, traffic.flops)
            timed.append(TimedCall(op.name, layer, args, start_s, time_s, counted.num_launches, traffic, counted))
            start_s += time_s
        return timed

    def _traffic(self) -> list[Traffic]:
        """Of every call. What was worked out once for weights and shapes is not worked out again in the next step."""
        on_host: dict[int, Batch] = {}
        of_this_step: dict[Any, Traffic] = {}
        traffic = []
        for op, _, args, _, _ in self._calls:
            known = of_this_step if op.reads_context else self._known_traffic
            key = (op.name, *[_TRAFFIC_KEYS[type(arg)](arg) for arg in args])
            if key not in known:
                host_args = (self._lengths_on_host(arg, on_host) if isinstance(arg, Batch) else arg for arg in args)
                known[key] = op.traffic(*host_args)
            traffic.append(known[key])
        return traffic

    def _lengths_on_host(self, batch: Batch, on_host: dict[int, Batch]) -> Batch:
        if id(batch) not in on_host:
            lengths = self.inner.download(batch.cu_seqlens_q), self.inner.download(batch.context_lens)
            on_host[id(batch)] = replace(batch, cu_seqlens_q=lengths[0], context_lens=lengths[1])
        return on_host[id(batch)]

    def _gaps_s(self, timed: Sequence[TimedCall]) -> float:
        """From the end of each op to the beginning of the next, without what the recorder does there."""
        if self.time_source is TimeSource.HOST_CLOCK:
            pairs = [(a[4], b[3]) for a, b in itertools.pairwise(self._calls) if b[0].place not in _AFTER_HOST]
            looking_s = self.overhead_s_per_call - self._inside_s
            return sum(max(next_called_s - end_s - looking_s, 0.0) for end_s, next_called_s in pairs)
        return sum(max(b.start_s - a.start_s - a.time_s, 0.0) for a, b in itertools.pairwise(timed))

    def run(self, op: Op, args: tuple[Any, ...]) -> Any:
        if not op.place.is_in_layer:
            self._layer = None
        elif op.place is Place.FIRST_OF_LAYER:
            self._layer = 0 if self._layer is None else self._layer + 1
        if op.is_fused and not self._profiled.fuses(op):
            return op.compose(self, *args)
        return self._timed(op, getattr(self.inner, op.name), args)

    def _timed_by_clock(self, op: Op, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        clock = self._clock
        start_s = clock()
        result = call(*args)
        if self._waits:
            self.inner.synchronize()
        self._calls.append((op, self._layer, args, start_s, clock()))
        return result

    def _timed_on_device(self, op: Op, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        counter, timer = self.inner.counter, self.inner.timer
        start_s = self._clock()
        if timer is not None:
            timer.begin()
        result = call(*args)
        if timer is not None:
            timer.end()
        if counter is not None:
            self._counted.append(counter.take(op.arrays_by_kind(args)))
        self._calls.append((op, self._layer, args, start_s, self._clock()))
        return result

    def _calibrate(self) -> tuple[float, float]:
        """(seconds of a recorded call's interval that are not the op's, seconds it costs in all beyond the op).

        Each call follows on reading memory, as ops do: what looking takes from the caches must come back from memory.
        """
        none = np.empty(0)
        weights = np.zeros(_CALIBRATION_BYTES, np.uint8)

        args = (none, none, Norm(none, 0.0))

        def op(*args: Any) -> None: ...

        def recorded(*args: Any) -> None:
            self._timed(OPS["rms_norm"], op, args)

        def cost(call: Callable[..., None]) -> float:
            times = []
            for _ in range(_CALIBRATION_CALLS):
                weights.max()
                start_s = self._clock()
                call(*args)
                times.append(self._clock() - start_s)
            return median(times)

        cost(recorded)  # imports and first times
        self._calls.clear()
        bare_s, whole_s = cost(op), cost(recorded)
        interval_s = median(end_s - start_s for _, _, _, start_s, end_s in self._calls)
        self._calls.clear()
        return max(interval_s - bare_s, 0.0), max(whole_s - bare_s, 0.0)


class _TrafficKeys(dict[type, Callable[[Any], Any]]):
    """By the type of an argument, what a formula makes of it: of an array its shape, of what holds weights the thing
    itself."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, Weight | Norm | Layer | GatedMlp | Attention | str):
            self[kind] = lambda arg: arg
        elif issubclass(kind, KVCacheLayer):
            self[kind] = lambda cache: (cache.k.shape, cache.k.dtype)
        elif issubclass(kind, Batch):
            self[kind] = attrgetter("num_tokens")
        else:
            self[kind] = attrgetter("shape") if hasattr(kind, "shape") else lambda arg: None
        return self[kind]


_TRAFFIC_KEYS = _TrafficKeys()


def _ops_by_name(calls: Sequence[TimedCall]) -> tuple[OpProfile, ...]:
    by_name: dict[str, list[TimedCall]] = {}
    for call in calls:
        by_name.setdefault(call.name, []).append(call)
    return tuple(map(_op, by_name.values()))


def _as_bar(call: TimedCall) -> OpCall:
    op = call.op
    return OpCall(op.name, call.layer, call.start_s, op.time_s, op.num_launches, op.total_bytes, op.flops)


def _op(calls: Sequence[TimedCall]) -> OpProfile:
    """Time and traffic of all calls of one op, put together."""
    traffic = sum((moved * count for moved, count in Counter(call.traffic for call in calls).items()), Traffic())
    counted = [call.counted for call in calls if call.counted is not None]
    return OpProfile(
        name=calls[0].name,
        num_calls=len(calls),
        time_s=sum(call.time_s for call in calls),
        weight_bytes=traffic.weight_bytes,
        kv_bytes=traffic.kv_read_bytes + traffic.kv_written_bytes,
        activation_bytes=traffic.activation_read_bytes + traffic.activation_written_bytes,
        flops=traffic.flops,
        kv_written_bytes=traffic.kv_written_bytes,
        activation_written_bytes=traffic.activation_written_bytes,
        num_launches=sum(call.num_launches for call in calls),
        counted=sum(counted, CountedTraffic()) if counted else None,
    )


def summarize(
    steps: Sequence[StepProfile],
    *,
    peaks: Peaks,
    memory: MemoryUse | None = None,
    decode_seqs: int = 1,
) -> ProfileSummary:
    """All steps of a profile in one; as decode steps those of at least ``decode_seqs`` sequences.

    What there was none of (no prefill step, no decode step) is 0.
    """
    profiled = [step for step in steps if step.profiled]
    prefill = [step for step in profiled if step.num_prefill_tokens]
    decode = [step for step in profiled if step.is_decode_of(decode_seqs)]
    ops, prefill_ops = ops_by_name(decode), ops_by_name(prefill)
    num_tokens = sum(step.num_decode_tokens for step in decode)
    weight_bytes = sum(op.weight_bytes for op in ops) // num_tokens if decode else 0
    kv_bytes = sum(op.kv_bytes for op in ops) // num_tokens if decode else 0
    decode_rates = [_rate(step.num_decode_tokens, step.net_time_s) for step in decode]
    prefill_rates = [_rate(step.num_prefill_tokens, step.net_time_s) for step in prefill]
    tokens_per_s = median(decode_rates) if decode else 0.0
    bandwidth = peaks.read_bandwidth_gbps * 1e9
    floor_s = (weight_bytes + kv_bytes) / bandwidth if bandwidth else 0.0
    unprofiled = [step for step in steps if not step.profiled and step.is_decode_of(decode_seqs)]
    compared = _like(unprofiled, decode)
    return ProfileSummary(
        num_prefill_steps=len(prefill),
        num_decode_steps=len(decode),
        prefill_tokens_per_s=_rate(
            sum(step.num_prefill_tokens for step in prefill), sum(step.net_time_s for step in prefill)
        ),
        decode_tokens_per_s=tokens_per_s,
        read_bandwidth_gbps=peaks.read_bandwidth_gbps,
        bytes_per_token=weight_bytes + kv_bytes,
        floor_s=floor_s,
        share_of_floor=tokens_per_s * floor_s,
        ops=ops,
        shares=_shares(decode, ops),
        weight_bytes_per_token=weight_bytes,
        kv_bytes_per_token=kv_bytes,
        overhead_s_per_step=_mean([step.overhead_s for step in decode]),
        time_source=profiled[0].time_source if profiled else TimeSource.HOST_CLOCK,
        peaks=peaks,
        decode_tokens_per_s_p10=_percentile(decode_rates, 10),
        decode_tokens_per_s_p90=_percentile(decode_rates, 90),
        prefill_tokens_per_s_p10=_percentile(prefill_rates, 10),
        prefill_tokens_per_s_p90=_percentile(prefill_rates, 90),
        prefill_ops=prefill_ops,
        prefill_shares=_shares(prefill, prefill_ops),
        decode_arithmetic_idle_share=_idle_share(decode, peaks),
        prefill_arithmetic_idle_share=_idle_share(prefill, peaks),
        launches_per_step=_mean([step.num_launches for step in decode]),
        launch_gap_s_per_step=_mean([step.launch_gap_s for step in decode]),
        host_s_per_step=_mean([step.host_time_s for step in decode]),
        num_unprofiled_steps=len(unprofiled),
        unprofiled_step_s=_median([step.time_s for step in _like(decode, unprofiled)]),
        profiled_step_s=_median([step.time_s for step in compared]),
        profiled_ops_s=_median([step.ops_time_s for step in compared]),
        memory=memory,
        decode_seqs=decode_seqs,
    )


def _like(others: Sequence[StepProfile], steps: Sequence[StepProfile]) -> list[StepProfile]:
    """Those of the steps that have as many sequences as some of the others: only they compare."""
    sizes = {step.num_seqs for step in others}
    return [step for step in steps if step.num_seqs in sizes]


def _idle_share(steps: Sequence[StepProfile], peaks: Peaks) -> float | None:
    flops = sum(op.flops for step in steps for op in step.ops)
    return idle_share(flops, sum(step.net_time_s for step in steps), peaks)


def _shares(steps: Sequence[StepProfile], ops: Sequence[OpProfile]) -> tuple[tuple[str, float], ...]:
    times = [(op.name, op.time_s) for op in ops] + [("host", sum(step.host_time_s for step in steps))]
    total = sum(time_s for _, time_s in times)
    shares = [(name, time_s / total) for name, time_s in times] if total else []
    return tuple(sorted(shares, key=lambda share: -share[1]))


def _rate(count: int, time_s: float) -> float:
    return count / time_s if time_s else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _percentile(values: Sequence[float], percent: int) -> float:
    """Interpolated between the nearest two; of a single value, that value."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return quantiles(values, n=100, method="inclusive")[percent - 1]
