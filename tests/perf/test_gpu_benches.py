"""The scripts that measure a GPU, as far as they go without one."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from numba_engine.formats import BF16, FORMATS, Q4_0, Format, StoredTensor, dequantize
from perf import bench_decode, gpu_time
from perf.random_model import CONFIGS, copied_weight, make_backend, random_model, streamed_bytes
from perf.random_rows import random_rows

SCRIPTS = ("bench_ops", "bench_decode", "compare_torch", "predict_kernels")


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"perf.{name}").main()
    assert stopped.value.code == 0
    assert "--out" in capsys.readouterr().out


@pytest.mark.kernels
def test_decode_is_timed_on_the_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(True, True, bench_decode.Workload(2, 20, 1)), (True, False, bench_decode.Workload(1, 17, 1))]
    monkeypatch.setattr(bench_decode, "_cases", lambda dry_run: iter(cases))
    out = tmp_path / "decode.json"
    monkeypatch.setattr(sys, "argv", ["bench_decode", "--dry-run", "--out", str(out)])
    bench_decode.main()
    report = json.loads(out.read_text())
    assert report["dry_run"] is True
    assert report["gpu"]["read_gbps"] > 0
    assert {"machine", "versions", "commit", "date"} <= report.keys()
    assert [(r["num_seqs"], r["context"], r["graph"]) for r in report["results"]] == [(2, 20, True), (1, 17, False)]
    for result in report["results"]:
        assert result["tokens_per_s"] == pytest.approx(1e3 * result["num_seqs"] / result["step_ms"])
        assert result["share_of_read"] == pytest.approx(result["floor_ms"] / result["step_ms"])


@pytest.mark.parametrize("format", list(FORMATS.values()), ids=repr)
def test_random_weights_are_as_large_as_real_ones(format: Format) -> None:
    """Rows beyond those drawn repeat them."""
    rows, columns = 600, 3 * max(32, format.block_size)
    data = random_rows(np.random.default_rng(0), format, rows, columns)
    values = dequantize(StoredTensor("w", format, (rows, columns), data))
    assert values.shape == (rows, columns)
    assert np.sqrt((values**2).mean()) == pytest.approx(0.02, rel=0.1)
    assert abs(values.mean()) < 0.0025  # nibbles of Q4_0 are -8 to 7
    assert (values[512:] == values[:88]).all()


def test_a_model_streams_as_many_bytes_as_its_shape_says() -> None:
    backend, config = make_backend(dry_run=True), replace(CONFIGS["tiny"], vocab_size=128)
    weights = random_model(backend, config, BF16)
    layer = (4 + 2 * 2) * 64 * 256 + 256 * 256 + 2 * 512 * 256 + 256 * 512
    assert streamed_bytes(weights) == 2 * (2 * layer + 128 * 256)
    first, second = (each.mlp.down_proj.segments[0].data for each in weights.layers)
    assert first is not second
    assert (backend.download(first) == backend.download(second)).all()


@pytest.mark.kernels
def test_copies_lie_elsewhere() -> None:
    backend = make_backend(dry_run=True)
    weight = random_model(backend, replace(CONFIGS["tiny"], vocab_size=32), Q4_0).lm_head
    copy = copied_weight(backend, weight)
    assert copy.shape == weight.shape
    assert copy.segments[0].data.on_device.pointer != weight.segments[0].data.on_device.pointer


def test_nothing_starts_after_the_deadline_and_what_is_left_out_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(gpu_time.time, "monotonic", lambda: clock[0])
    deadline = gpu_time.Deadline(5)
    assert deadline.allows("one")
    clock[0] = 105.0
    assert not deadline.allows("two")
    assert deadline.left_out == ["two"]


def test_a_report_is_whole_after_every_result(tmp_path: Path) -> None:
    report = gpu_time.Report(tmp_path / "r.json", gpu={"name": "some"})
    for number in (1, 2):
        report.add({"number": number})
        assert [r["number"] for r in json.loads((tmp_path / "r.json").read_text())["results"]] == [1, 2][:number]
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]
