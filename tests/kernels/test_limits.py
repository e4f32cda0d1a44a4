"""The limits of control groups and of the process, in the layouts that systems have."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from numba_engine import LLM, EngineConfig, OutOfMemoryError
from numba_engine.backends.cpu.limits import cpu_quota, memory_left
from tests.tiny_models import TinyModel, write_hf

MIB = 2**20
V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory ro master:9 - cgroup cgroup rw,memory\n"
)


def system(tmp_path: Path, cgroup: str, mounts: str, groups: dict[str, dict[str, object]]) -> Path:
    """A root folder with these control groups."""
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text("23 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts)
    for group, files in groups.items():
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")
    return tmp_path


def v2(max_mib: int | str, current_mib: int, inactive_mib: int = 0, high: int | str = "max") -> dict[str, object]:
    return {
        "memory.max": max_mib if max_mib == "max" else int(max_mib) * MIB,
        "memory.high": high if high == "max" else int(high) * MIB,
        "memory.current": current_mib * MIB,
        "memory.stat": f"anon 4096\ninactive_file {inactive_mib * MIB}",
    }


def v1(limit_mib: int | None, usage_mib: int, inactive_mib: int = 0) -> dict[str, object]:
    return {
        "memory.limit_in_bytes": 9223372036854771712 if limit_mib is None else limit_mib * MIB,
        "memory.usage_in_bytes": usage_mib * MIB,
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive_mib * MIB}",
    }


DOCKER = "/docker/0a1b"
V1_LINES = "12:cpu,cpuacct:{path}\n4:memory:{path}\n1:name=systemd:{path}\n"

CASES = {
    "v2 in a namespace of its own": ("0::/\n", V2.format(root="/"), {"": v2(700, 100)}, 600),
    "v2, systemd's MemoryMax of a service": (
        "0::/system.slice/engine.service\n",
        V2.format(root="/"),
        {"": {}, "system.slice": v2("max", 5000), "system.slice/engine.service": v2(700, 50, 20)},
        670,
    ),
    "v2, a limit above the process's own group": (
        "0::/user.slice/user-1.slice/run.scope\n",
        V2.format(root="/"),
        {
            "user.slice": v2(500, 400),
            "user.slice/user-1.slice": v2("max", 30),
            "user.slice/user-1.slice/run.scope": v2(900, 10),
        },
        100,
    ),
    "v2, memory.high": ("0::/a\n", V2.format(root="/"), {"a": v2(900, 100, high=300)}, 200),
    "v2, a container in the host's namespace": (
        f"0::{DOCKER}/inner\n",
        V2.format(root=DOCKER),
        {"": v2(700, 100), "inner": v2(650, 100)},
        550,
    ),
    "v2, a group outside of what is mounted": ("0::/../../other\n", V2.format(root="/"), {"": v2(700, 100)}, 600),
    "v1 in a container": (V1_LINES.format(path=DOCKER), V1.format(root=DOCKER), {"memory": v1(700, 100, 50)}, 650),
    "v1 on the host": (
        V1_LINES.format(path="/engine"),
        V1.format(root="/"),
        {"memory": v1(None, 9000), "memory/engine": v1(700, 100)},
        600,
    ),
    "v1 beside an empty v2": (
        V1_LINES.format(path="/engine") + "0::/\n",
        V1.format(root="/") + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        {"unified": {}, "memory/engine": v1(300, 100)},
        200,
    ),
    "more used than allowed": ("0::/\n", V2.format(root="/"), {"": v2(100, 101)}, 0),
    "no limit": ("0::/\n", V2.format(root="/"), {"": v2("max", 100)}, None),
    "no control groups": ("", "", {}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_that_control_groups_leave(tmp_path: Path, case: str) -> None:
    cgroup, mounts, groups, left_mib = CASES[case]
    left = memory_left(system(tmp_path, cgroup, mounts, groups))
    assert left == (None if left_mib is None else left_mib * MIB)


@pytest.mark.parametrize(
    ("cgroup", "mounts", "groups", "cores"),
    [
        ("0::/a/b\n", V2.format(root="/"), {"a": {"cpu.max": "150000 100000"}, "a/b": {"cpu.max": "max 100000"}}, 1.5),
        ("0::/\n", V2.format(root="/"), {"": {"cpu.max": "max 100000"}}, None),
        (
            V1_LINES.format(path=DOCKER),
            V1.format(root=DOCKER),
            {"cpu,cpuacct": {"cpu.cfs_quota_us": 50000, "cpu.cfs_period_us": 100000}},
            0.5,
        ),
        (
            V1_LINES.format(path="/"),
            V1.format(root="/"),
            {"cpu,cpuacct": {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000}},
            None,
        ),
    ],
)
def test_time_that_control_groups_give(
    tmp_path: Path, cgroup: str, mounts: str, groups: dict[str, dict[str, object]], cores: float | None
) -> None:
    assert cpu_quota(system(tmp_path, cgroup, mounts, groups)) == cores


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_memory_that_resource_limits_leave(name: str) -> None:
    script = (
        "import resource, numba_engine.backends.cpu.limits as limits;"
        f"resource.setrlimit(resource.{name}, (3 * 2**30, 3 * 2**30));"
        "before = limits.memory_left(); block = bytearray(2**28); print(before, limits.memory_left())"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    before, after = map(int, output.split())
    assert 2**30 < before < 3 * 2**30
    assert 0 <= before - after - 2**28 <= 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_cache_that_cannot_be_allocated_is_told_with_the_way_out(tmp_path: Path) -> None:
    model = write_hf(tmp_path / "tiny", TinyModel(max_position=256))
    script = (
        "import resource, sys; from numba_engine import LLM, EngineConfig, OutOfMemoryError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))\n"
        "try: LLM(sys.argv[1], EngineConfig(backend='cpu', num_threads=1, num_kv_blocks=2**26))\n"
        "except OutOfMemoryError as error: print(error)\n"
    )
    command = [sys.executable, "-c", script, str(model)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    assert re.match(r"the KV cache of \d+ bytes cannot be allocated .*Lower --kv-cache-bytes", output)


def test_weights_that_do_not_fit_are_told_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("Unable to allocate 9.9 GiB")

    monkeypatch.setattr("numba_engine.engine.loading.load_weights", fail)
    with pytest.raises(OutOfMemoryError, match=r"the weights do not fit into memory, .*9\.9 GiB"):
        LLM(str(write_hf(tmp_path / "tiny", TinyModel(max_position=256))), EngineConfig(backend="cpu"))
