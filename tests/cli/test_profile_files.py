"""profile --html, --trace, --csv, and profile diff."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.cli.fake_llm import FakeLLM

Run = Callable[..., Result]


def test_files_are_written_beside_the_summary(run: Run, tmp_path: Path) -> None:
    html, trace, lines = tmp_path / "r.html", tmp_path / "t.json", tmp_path / "o.csv"
    result = run("profile", "m", "-n", "3", "--html", str(html), "--trace", str(trace), "--csv", str(lines))
    assert (result.exit_code, result.stderr) == (0, f"wrote {html}\nwrote {trace}\nwrote {lines}\n")
    assert "250.0 tok/s" in result.stdout
    assert "<title>Profile of tiny</title>" in html.read_text(encoding="utf-8")
    events = json.loads(trace.read_text())["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "step"] == [
        "step 0: prefill",
        "step 1: decode",
        "step 2: decode",
    ]
    with lines.open() as opened:
        assert [(row["step"], row["op"]) for row in csv.DictReader(opened)] == [(str(i), "linear") for i in range(3)]


def test_a_place_that_is_not_there_is_said_before_the_model_is_loaded(
    run: Run, llms: list[FakeLLM], tmp_path: Path
) -> None:
    result = run("profile", "m", "--csv", str(tmp_path / "none" / "o.csv"))
    assert result.exit_code == 2
    assert f"there is no directory '{tmp_path / 'none'}'" in result.stderr
    assert not llms


def test_without_matplotlib_the_extra_is_named_before_the_model_is_loaded(
    run: Run, llms: list[FakeLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("profile", "m", "--html", str(tmp_path / "r.html"))
    assert result.exit_code == 2
    assert "pip install -e '.[report]'" in result.stderr
    assert not llms
    assert run("profile", "m", "-n", "3", "--csv", str(tmp_path / "o.csv")).exit_code == 0, "only --html needs it"


def test_diff_of_two_saved_profiles(run: Run, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, tokens in zip(files, ("3", "4"), strict=True):
        file.write_text(run("profile", "m", "-n", tokens, "--json").stdout)
    result = run("profile", "diff", *map(str, files))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"A: {files[0]}\nB: {files[1]}\n")
    diff = json.loads(run("profile", "diff", *map(str, files), "--json").stdout)
    linear = next(op for op in diff["ops"] if (op["phase"], op["name"]) == ("decode", "linear"))
    assert (linear["a"]["time_s_per_token"], linear["ratio"]) == (pytest.approx(0.003), pytest.approx(1.0))


def test_diff_wants_profiles(run: Run, tmp_path: Path, llms: list[FakeLLM]) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"rows": []}')
    result = run("profile", "diff", str(file), str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {file} is no profile")
    missing = run("profile", "diff", str(file), str(tmp_path / "b.json"))
    assert missing.exit_code == 2
    assert "does not exist" in missing.stderr
    assert "profile diff [OPTIONS] A.json B.json" in run("profile", "diff", "--help").stdout
    assert not llms


def test_options_of_profile_still_read_the_environment(run: Run, llms: list[FakeLLM]) -> None:
    run("profile", "m", env={"NUMBA_ENGINE_PROFILE_MAX_TOKENS": "2", "NUMBA_ENGINE_PROFILE_NUM_THREADS": "1"})
    assert (llms[0].params[0].max_tokens, llms[0].config.num_threads) == (2, 1)
