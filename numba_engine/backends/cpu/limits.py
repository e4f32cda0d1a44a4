"""What a process may use beside what the machine has: its control groups (v1 and v2) and its resource limits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_ROOT = Path("/")


def memory_left(root: Path = _ROOT) -> int | None:
    """Bytes that control groups and resource limits still allow; None where nothing is limited.

    Args:
        root: Where ``proc`` and the control groups' file systems are.
    """
    left = [*map(_memory_left_in, _groups("memory", root)), *_left_by_resource_limits(root)]
    return min((max(0, nbytes) for nbytes in left if nbytes is not None), default=None)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Cores' worth of time that the control groups allow; None where it is not limited."""
    return min((quota for group in _groups("cpu", root) if (quota := _cpu_quota_in(group)) is not None), default=None)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the process's own control group and of those above it, as far as they can be seen."""
    mounts = list(_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        version = "cgroup2" if number == "0" and not controllers else "cgroup"
        if version == "cgroup" and controller not in controllers.split(","):
            continue
        for kind, mounted, point, options in mounts:
            if kind != version or (version == "cgroup" and controller not in options):
                continue
            # A container may see only its own part of the hierarchy, under a name that only the host knows.
            inside = path[len(mounted) :] if path.startswith(mounted) else path
            own = root / point.strip("/") / inside.strip("/")
            top = root / point.strip("/")
            if ".." in Path(inside).parts or not own.is_dir():
                own = top
            while own != top:
                yield own
                own = own.parent
            yield top


def _mounts(root: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """Of control groups: the file system's name, what is mounted of it and where, and its options."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind.startswith("cgroup"):
            mounted, point = before.split(" ")[3:5]
            yield kind, mounted.rstrip("/"), point, options.split(",")


def _memory_left_in(group: Path) -> int | None:
    limits = [_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    limit = min((limit for limit in limits if limit is not None), default=None)
    used = next(
        (n for name in ("current", "usage_in_bytes") if (n := _number(group / f"memory.{name}")) is not None), 0
    )
    if limit is None:
        return None
    # What was read from files and not lately used is given back before the limit is felt.
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    return limit - used + int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _left_by_resource_limits(root: Path) -> Iterator[int | None]:
    pages = _read(root / "proc/self/statm").split()
    if resource is None or not pages:
        return
    page = os.sysconf("SC_PAGE_SIZE")
    for name, used in ((resource.RLIMIT_AS, int(pages[0]) * page), (resource.RLIMIT_DATA, int(pages[5]) * page)):
        limit, _ = resource.getrlimit(name)
        yield None if limit == resource.RLIM_INFINITY else limit - used


def _cpu_quota_in(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    with contextlib.suppress(ValueError, ZeroDivisionError):  # no limit reads "max", or -1
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def _number(file: Path) -> int | None:
    """None where there is no such file, or no limit, which reads "max"."""
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
