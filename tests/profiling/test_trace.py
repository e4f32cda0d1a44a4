"""The trace: events that Perfetto nests rightly, with the figures of each op."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from numba_engine.profiling.report import OpCall
from numba_engine.profiling.trace import profile_as_trace
from tests.profiling.sample_profile import LINEAR, MODEL, STEPS, SUMMARY

Event = dict[str, Any]


@pytest.fixture(scope="module")
def trace() -> Event:
    loaded: Event = json.loads(json.dumps(profile_as_trace(MODEL, STEPS, SUMMARY), allow_nan=False))
    return loaded


def complete(trace: Event, category: str) -> list[Event]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == category]


def test_steps_follow_one_another(trace: Event) -> None:
    steps = complete(trace, "step")
    assert [step["name"] for step in steps] == ["step 0: prefill", *(f"step {i}: decode" for i in (1, 2, 3))]
    assert [step["ts"] for step in steps] == pytest.approx([0, 21_500, 32_000, 42_500])
    assert [step["dur"] for step in steps] == pytest.approx([21_500, 10_500, 10_500, 12_500])
    assert steps[0]["args"]["num_prefill_tokens"] == 7
    assert steps[1]["args"]["bytes"] == sum(op.total_bytes for op in STEPS[1].ops)
    assert steps[1]["args"]["gbps"] == pytest.approx(steps[1]["args"]["bytes"] / 0.0103 / 1e9)


def test_ops_lie_one_after_the_other_inside_their_step(trace: Event) -> None:
    for step, profile in zip(complete(trace, "step"), STEPS, strict=True):
        end = step["ts"] + step["dur"]
        inside = [
            event
            for category in ("op", "host", "overhead")
            for event in complete(trace, category)
            if step["ts"] <= event["ts"] < end
        ]
        names = [*(op.name for op in profile.ops), "host", "cost of looking"]
        assert [event["name"] for event in sorted(inside, key=lambda event: event["ts"])] == names
        at = step["ts"]
        for event in sorted(inside, key=lambda event: event["ts"]):
            assert event["ts"] == pytest.approx(at, abs=1e-6)
            at = event["ts"] + event["dur"]
        assert at == pytest.approx(end, abs=1e-6)
        assert round(at * 1000) <= round(end * 1000)


def test_args_of_an_op(trace: Event) -> None:
    linear = next(event for event in complete(trace, "op") if event["name"] == "linear" and event["ts"] > 21_500)
    assert linear["args"] == {
        "calls": 61,
        "bytes": 90_300_000,
        "weight_bytes": 90_000_000,
        "kv_bytes": 0,
        "activation_bytes": 300_000,
        "flops": 180_600_000,
        "gbps": pytest.approx(15.05),
        "gflops": pytest.approx(30.1),
        "flops_per_byte": pytest.approx(2.0),
    }
    assert linear["dur"] == pytest.approx(LINEAR.time_s * 1e6)


def test_every_event_has_what_its_kind_needs(trace: Event) -> None:
    """Trace Event Format: name, ph, pid, tid; ts for all but metadata; dur of complete events."""
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        assert event["ph"] in "MXC"
        assert ("ts" in event) == (event["ph"] != "M")
        assert ("dur" in event) == (event["ph"] == "X")
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert [counter["ts"] for counter in counters] == [step["ts"] for step in complete(trace, "step")]


def as_perfetto_reads_it(events: list[Event]) -> list[tuple[int, Event]]:
    """(depth, event) of all slices, by the rules of Perfetto's JSON importer (``JsonTraceParser``, ``SliceTracker``).

    Types of fields as the importer wants them; slices of one track are sorted by time, in the file's order where two
    begin together; one that begins before the end of another on the stack must end within it, else it is dropped.
    """
    slices = []
    for place, event in enumerate(events):
        assert isinstance(event["ph"], str)
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            continue
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
            continue
        assert isinstance(event["dur"], int | float)
        assert event["dur"] >= 0
        assert isinstance(event["cat"], str)
        start_ns, end_ns = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
        slices.append((event["pid"], event["tid"], start_ns, place, end_ns, event))
    read: list[tuple[int, Event]] = []
    stack: list[int] = []
    track = None
    for pid, tid, start_ns, _, end_ns, event in sorted(slices, key=lambda s: s[:4]):
        if (pid, tid) != track:
            track, stack = (pid, tid), []
        while stack and stack[-1] <= start_ns:
            stack.pop()
        assert not stack or end_ns <= stack[-1], f"{event['name']} overlaps the slice it begins in"
        read.append((len(stack), event))
        stack.append(end_ns)
    return read


CALLS = (
    OpCall("embedding", None, 0.0002, 0.0001, 1, 900, 0),
    OpCall("linear", 0, 0.0003, 0.004, 2, 45_000_000, 90_000_000),
    OpCall("attention", 0, 0.00429999999, 0.003, 1, 3_000_000, 7_200_000),  # a clock's rounding before the end
    OpCall("linear", 1, 0.0079, 0.002, 1, 45_000_000, 90_600_000),
)


@pytest.fixture(scope="module")
def placed() -> Event:
    """Two steps with their calls, and between them one that was not profiled."""
    steps = [
        replace(STEPS[1], timeline=CALLS),
        replace(STEPS[2], profiled=False, ops=(), overhead_s=0.0),
        replace(STEPS[3], timeline=CALLS),
    ]
    loaded: Event = json.loads(json.dumps(profile_as_trace(MODEL, steps, SUMMARY), allow_nan=False))
    return loaded


def test_perfetto_keeps_every_slice_in_its_place(trace: Event, placed: Event) -> None:
    for one, num_steps in ((trace, 4), (placed, 3)):
        read = as_perfetto_reads_it(one["traceEvents"])
        assert len(read) == sum(event["ph"] == "X" for event in one["traceEvents"])
        assert [event["cat"] for depth, event in read if depth == 0] == ["step"] * num_steps
        assert {event["cat"] for depth, event in read if depth == 1} <= {"op", "host", "overhead"}
        assert max(depth for depth, _ in read) == 1


def test_the_reader_above_would_tell_of_a_slice_that_sticks_out(placed: Event) -> None:
    events = [dict(event) for event in placed["traceEvents"]]
    last = max((event for event in events if event.get("cat") == "op"), key=lambda event: event["ts"])
    last["dur"] += 10_000
    with pytest.raises(AssertionError, match="linear overlaps the slice it begins in"):
        as_perfetto_reads_it(events)


def test_calls_lie_where_they_were(placed: Event) -> None:
    steps, calls = complete(placed, "step"), complete(placed, "op")
    assert [step["name"] for step in steps] == ["step 1: decode", "step 2: decode, not profiled", "step 3: decode"]
    assert steps[1]["args"] == {"num_prefill_tokens": 0, "num_decode_tokens": 1, "num_seqs": 1}
    assert [call["name"] for call in calls] == [call.name for call in CALLS] * 2
    for step, of_step in ((steps[0], calls[:4]), (steps[2], calls[4:])):
        assert [call["ts"] - step["ts"] for call in of_step] == pytest.approx([200, 300, 4300, 7900])
        assert [call["dur"] for call in of_step] == pytest.approx([100, 4000, 3000, 2000])
    assert calls[1]["args"] == {
        "launches": 2,
        "bytes": 45_000_000,
        "flops": 90_000_000,
        "layer": 0,
        "gbps": pytest.approx(11.25),
    }
    assert "layer" not in calls[0]["args"]
    assert placed["otherData"]["laid_out"] == "single calls"
    assert len([event for event in placed["traceEvents"] if event["ph"] == "C"]) == 2


def test_it_says_what_it_does_not_know(trace: Event) -> None:
    said = trace["otherData"]
    assert said["laid_out"] == "totals of each op, not single calls"
    assert (said["time"], said["bytes_and_flops"]) == ("measured", "by formula")
    assert said["model"]["name"] == MODEL.name
