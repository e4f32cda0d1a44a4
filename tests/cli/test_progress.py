"""The progress bar: one line on a terminal, nothing anywhere else."""

from __future__ import annotations

import io
import sys

import pytest

from numba_engine.cli.loading import ProgressBar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _drawn(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, *, quiet: bool = False) -> str:
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressBar(quiet=quiet) as progress:
        for index in range(50):
            progress(f"layers.{index}.qkv_proj", index * 10**6, 50 * 10**6)
    return stderr.getvalue()


def test_one_bar_for_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = _drawn(monkeypatch, _Terminal())
    last_frame = drawn.rsplit("layers.", 1)[1]
    assert last_frame.startswith("49.qkv_proj")
    assert "49.0/50.0 MB" in last_frame
    assert "\x1b[1A\x1b[2K\x1b[1A" not in drawn, "it never takes more than one line"


def test_silent_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _drawn(monkeypatch, io.StringIO()) == ""
    assert _drawn(monkeypatch, _Terminal(), quiet=True) == ""
