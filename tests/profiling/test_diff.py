"""Two profiles side by side, and files that hold none."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from numba_engine.errors import ConfigError
from numba_engine.profiling.diff import OpDiff, diff_as_json, diff_profiles, diff_tables
from numba_engine.profiling.exports import profile_as_json
from numba_engine.profiling.recorder import summarize
from numba_engine.profiling.report import MemoryUse, ProfileSummary, StepProfile
from numba_engine.profiling.saved_profile import SavedProfile, read_profile
from tests.profiling.sample_profile import (
    ATTENTION,
    COUNTED_STEPS,
    COUNTED_SUMMARY,
    DECODE_STEP,
    LINEAR,
    MODEL,
    STEPS,
    STORE_KV,
    SUMMARY,
    peaks,
)

A = SavedProfile(MODEL, STEPS, SUMMARY)


def profile_of(*steps: StepProfile, **model: Any) -> SavedProfile:
    return SavedProfile(replace(MODEL, **model), steps, summarize(steps, peaks=peaks(31.0)))


def op(ops: tuple[OpDiff, ...], phase: str, name: str) -> OpDiff:
    return next(op for op in ops if (op.phase, op.name) == (phase, name))


UNPROFILED = replace(DECODE_STEP, index=4, profiled=False, ops=(), overhead_s=0.0)


@pytest.mark.parametrize(
    ("steps", "summary"),
    [
        (STEPS, SUMMARY),
        ((*STEPS, UNPROFILED), summarize([*STEPS, UNPROFILED], peaks=peaks(31.0), memory=MemoryUse(1, 2, 3, 4, 5))),
        (COUNTED_STEPS, COUNTED_SUMMARY),
    ],
    ids=["plain", "with a step that was not profiled", "counted, with a timeline"],
)
def test_what_was_written_is_what_is_read(
    tmp_path: Path, steps: tuple[StepProfile, ...], summary: ProfileSummary
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(profile_as_json(MODEL, steps, summary), allow_nan=False))
    read = read_profile(file)
    assert (read.model, read.steps) == (MODEL, steps)
    assert replace(read.summary, shares=()) == replace(summary, shares=())
    assert dict(read.summary.shares) == dict(summary.shares)


def test_steps_that_were_not_profiled_and_other_clocks_do_not_mislead() -> None:
    simulated = SavedProfile(MODEL, COUNTED_STEPS, COUNTED_SUMMARY)
    assert ("time_source", "HOST_CLOCK", "SIMULATED") in diff_profiles(A, simulated).model
    same = diff_profiles(A, profile_of(*STEPS, UNPROFILED))
    assert all(op.ratio == pytest.approx(1) for op in same.ops)
    figures = {figure.name: figure for figure in same.summary}
    assert (figures["num_unprofiled_steps"].a, figures["num_unprofiled_steps"].b) == (0, 1)
    assert figures["unprofiled_step_s"].delta == pytest.approx(0.0105)
    assert "peaks" not in figures


def test_ops_are_compared_by_the_token() -> None:
    """B's two steps decode 4 tokens each: half the time a step of A is an eighth of it a token."""
    faster = replace(DECODE_STEP, num_decode_tokens=4, num_seqs=4, ops=(replace(LINEAR, time_s=0.003), ATTENTION))
    diff = diff_profiles(A, profile_of(faster, replace(faster, index=2)))
    linear = op(diff.ops, "decode", "linear")
    assert linear.a is not None
    assert linear.b is not None
    assert (linear.a.time_s_per_token, linear.b.time_s_per_token) == pytest.approx((0.006, 0.003 / 4))
    assert linear.delta_s == pytest.approx(-0.00525)
    assert linear.ratio == pytest.approx(0.125)
    assert (linear.a.gbps, linear.b.gbps) == pytest.approx((15.05, 30.1))
    # A: 9.5 ms of ops a step, 0.8 + 0.8 + 2.8 ms of host in all.
    assert linear.a.share == pytest.approx(18 / 32.9)
    assert linear.b.share == pytest.approx(3 / 10.3)


def test_an_op_on_one_side_only_has_no_ratio() -> None:
    new = replace(STORE_KV, name="norm_lm_head")
    diff = diff_profiles(A, profile_of(replace(DECODE_STEP, ops=(ATTENTION, LINEAR, new))))
    assert op(diff.ops, "decode", "store_kv").b is None
    assert op(diff.ops, "decode", "store_kv").ratio is None
    assert op(diff.ops, "decode", "store_kv").delta_s == pytest.approx(-0.0005)
    added = op(diff.ops, "decode", "norm_lm_head")
    assert (added.a, added.ratio, added.delta_s) == (None, None, 0.0005)
    assert op(diff.ops, "prefill", "linear").b is None


def test_what_changed_most_comes_first() -> None:
    slower = replace(DECODE_STEP, time_s=0.02, ops=(replace(ATTENTION, time_s=0.008), LINEAR, STORE_KV))
    names = [one.name for one in diff_profiles(A, profile_of(slower)).ops if one.phase == "decode"]
    assert names[:2] == ["attention", "host"]


def test_json_carries_deltas_and_ratios_and_what_ran_otherwise() -> None:
    diff = diff_as_json(diff_profiles(A, profile_of(*STEPS[:3], num_threads=1, weight_formats=("Q8_0",))))
    diff = json.loads(json.dumps(diff, allow_nan=False))
    assert diff["model"] == {
        "num_threads": {"a": 2, "b": 1},
        "weight_formats": {"a": ["Q4_1", "Q8_0"], "b": ["Q8_0"]},
    }
    assert diff["summary"]["num_decode_steps"] == {"a": 3, "b": 2, "delta": -1, "ratio": pytest.approx(2 / 3)}
    assert diff["summary"]["decode_tokens_per_s"]["ratio"] == 1.0
    host = next(one for one in diff["ops"] if (one["phase"], one["name"]) == ("decode", "host"))
    assert host["delta_s"] == pytest.approx(0.0008 - 0.0044 / 3)


def test_tables_show_both_sides() -> None:
    faster = replace(DECODE_STEP, time_s=0.0075, ops=(ATTENTION, replace(LINEAR, time_s=0.003), STORE_KV))
    console = Console(width=110, no_color=True, file=io.StringIO())
    with console.capture() as capture:
        console.print(diff_tables(diff_profiles(A, profile_of(faster, num_threads=1)), "a.json", "b.json"))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert lines[:3] == ["A: a.json", "B: b.json", "num_threads: A 2, B 1"]
    assert "decode_tokens_per_s 97.1 137.0 +39.9 1.41" in lines
    assert "linear 6.00 ms 3.00 ms -3.00 ms 0.50 54.7% 41.1% 15.0 30.1" in lines
    assert lines[lines.index("decode, per generated token") + 2].startswith("linear")
    assert any(line.startswith("total 10.97 ms 7.30 ms -3.67 ms 0.67") for line in lines)


def test_names_from_a_file_are_text_and_no_markup() -> None:
    odd = replace(DECODE_STEP, ops=(replace(LINEAR, name="[/red]"),))
    console = Console(width=110, no_color=True, file=io.StringIO())
    with console.capture() as capture:
        console.print(diff_tables(diff_profiles(A, profile_of(odd)), "[a", "[/b]"))
    assert "[/red]" in capture.get()


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("steps",), None, "steps is null, not a list"),
        (("model",), [], "model is a list, not an object"),
        (("summary", "floor_s"), "fast", 'summary.floor_s is "fast", not a number of 0 or more'),
        (("summary", "floor_s"), float("nan"), "summary.floor_s is NaN, not a number of 0 or more"),
        (("summary", "shares", "linear"), -1, "summary.shares.linear is -1, not a number of 0 or more"),
        (("steps", 1, "num_seqs"), 1.5, "steps[1].num_seqs is 1.5, not a whole number of 0 or more"),
        (("steps", 1, "ops", 2, "flops"), True, "steps[1].ops[2].flops is true, not a whole number of 0 or more"),
        (("steps", 1, "ops", 2, "flops"), 10**400, "not a whole number of 0 or more"),
        (("steps", 1, "ops", 0, "name"), "\x1b[2J", r'steps[1].ops[0].name is "\u001b[2J", not a printable text'),
        (("model", "has_chat_template"), 1, "model.has_chat_template is 1, not true or false"),
    ],
)
def test_a_profile_with_something_wrong(
    tmp_path: Path, path: tuple[str | int, ...], value: object, reason: str
) -> None:
    data: Any = json.loads(json.dumps(profile_as_json(MODEL, STEPS, SUMMARY)))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file = tmp_path / "p.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as error:
        read_profile(file)
    assert str(error.value).startswith(f"{file} is no profile as written by `numba-engine profile MODEL --json`: ")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is not JSON"),
        (b"\xff\xfe{}", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[1, 2]", "the file is a list, not an object"),
        (b'{"model": {}, "rows": []}', "steps is missing"),
        (b'{"model": {}, "steps": [], "summary": {}}', "model.name is missing"),
    ],
)
def test_a_file_that_is_no_profile(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "p.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        read_profile(file)


def test_a_profile_of_before_a_field_was_added_is_read(tmp_path: Path) -> None:
    data = json.loads(json.dumps(profile_as_json(MODEL, STEPS, SUMMARY)))
    del data["summary"]["overhead_s_per_step"]
    data["steps"][0]["something_new"] = 1
    file = tmp_path / "p.json"
    file.write_text(json.dumps(data))
    assert read_profile(file).summary.overhead_s_per_step == 0
