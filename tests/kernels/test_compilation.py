"""Compiled kernels on disk: found again, never stale, not needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from numba_engine.backends.cpu import compilation

PROGRAM = """
import sys
from pathlib import Path
from numba_engine.backends.cpu import compilation
from numba_engine.backends.cpu.kernels.rms_norm import rms_norm_kernel
rms_norm_kernel()
compiled = compilation._keep_alive[-1]
print(compilation.cache_folder(), compiled.cache_hits)
"""


def run_program(home: Path) -> list[str]:
    environment = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "TMPDIR": str(home), "PATH": "/usr/bin:/bin"}
    root = Path(compilation.__file__).parents[3]
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=root, check=True, capture_output=True, text=True
    )
    return output.stdout.split()


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first_folder, first_hits = run_program(tmp_path)
    second_folder, second_hits = run_program(tmp_path)
    assert (first_hits, second_hits) == ("0", "1")
    assert first_folder == second_folder
    assert Path(first_folder).is_relative_to(tmp_path)


def test_an_edit_of_any_source_changes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "package"
    (source / "kernels").mkdir(parents=True)
    (source / "kernels" / "helper.py").write_text("x = 1")
    monkeypatch.setattr(compilation, "_PACKAGE", source)
    monkeypatch.setattr(compilation.platformdirs, "user_cache_dir", lambda *args, **kwargs: str(tmp_path / "cache"))
    find = compilation.cache_folder.__wrapped__
    before = find()
    assert find() == before
    (source / "kernels" / "helper.py").write_text("x = 2")
    assert find() != before


def test_without_a_writable_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(compilation.platformdirs, "user_cache_dir", lambda *args, **kwargs: str(blocked))
    monkeypatch.setattr(compilation.tempfile, "gettempdir", lambda: str(blocked))
    assert compilation.cache_folder.__wrapped__() is None


def test_a_kernel_that_cannot_be_kept_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder was there when the process began, and is gone when the kernel is compiled."""
    folder = tmp_path / "kernels"
    monkeypatch.setattr(compilation, "cache_folder", lambda: folder)
    folder.mkdir()

    def double(x: int) -> int:
        return 2 * x

    doubled = compilation.launcher(double)
    folder.rmdir()
    folder.write_text("not a folder")
    assert doubled(21) == 42
    assert folder.read_text() == "not a folder"


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("kept_bytes", [0, 7, 300])
def test_a_damaged_file_is_compiled_and_kept_anew(tmp_path: Path, suffix: str, kept_bytes: int) -> None:
    folder = Path(run_program(tmp_path)[0])
    damaged = list(folder.rglob(f"*{suffix}"))
    assert damaged
    for file in damaged:
        file.write_bytes(file.read_bytes()[:kept_bytes])
    assert run_program(tmp_path)[1] == "0"
    assert run_program(tmp_path)[1] == "1"


def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all = tmp_path / "cache"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setattr(compilation.platformdirs, "user_cache_dir", lambda *args, **kwargs: str(open_to_all))
    monkeypatch.setattr(compilation.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = compilation.cache_folder.__wrapped__()
    assert folder is not None
    assert not folder.is_relative_to(open_to_all)
