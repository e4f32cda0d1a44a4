"""The trace: events that Perfetto nests rightly, with the figures of each op."""

from __future__ import annotations

import json
from typing import Any

import pytest

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


def test_it_says_what_it_does_not_know(trace: Event) -> None:
    said = trace["otherData"]
    assert said["laid_out"] == "totals of each op, not single calls"
    assert (said["time"], said["bytes_and_flops"]) == ("measured", "by formula")
    assert said["model"]["name"] == MODEL.name
