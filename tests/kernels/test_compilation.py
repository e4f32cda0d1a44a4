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


FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
NOWHERE = (
    "from numba_engine.backends.cpu import compilation as c;"
    "c.platformdirs.user_cache_dir = lambda *a, **k: '/dev/null'; c.tempfile.gettempdir = lambda: '/dev/null'"
)


@pytest.mark.skipif(sys.platform != "linux", reason="fills the disk by a resource limit")
@pytest.mark.parametrize("trouble", [FULL, NOWHERE])
def test_kernels_that_cannot_be_kept_are_said_once(tmp_path: Path, trouble: str) -> None:
    program = (
        f"{trouble}\n"
        "from numba_engine.backends.cpu.kernels.rms_norm import rms_norm_kernel\n"
        "from numba_engine.backends.cpu.kernels.store_kv import store_kv_kernel\n"
        "rms_norm_kernel(); store_kv_kernel()"
    )
    root = Path(compilation.__file__).parents[3]
    environment = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=root, check=True, capture_output=True, text=True
    ).stderr
    assert said.count("compiled kernels cannot be kept, so every start compiles them again") == 1
    assert "Traceback" not in said


def test_ptx_that_cannot_be_kept_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = pytest.importorskip("numba_engine.backends.cuda.compiler")
    said: list[object] = []
    monkeypatch.setattr(compiler, "warn_not_kept", said.append)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    compiler._write(tmp_path / "ptx" / "kernel.ptx", "code")
    assert [str(error) for error in said] == ["[Errno 28] No space left on device"]
    assert list((tmp_path / "ptx").iterdir()) == []
