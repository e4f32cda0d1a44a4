"""What the executor reports: one error class, with the kind of mistake and where it happened."""

from __future__ import annotations

from typing import Literal

ErrorKind = Literal[
    "syntax",
    "unsupported",
    "launch",
    "out-of-bounds",
    "misaligned",
    "uninitialised-register",
    "uninitialised-shared",
    "uninitialised-global",
    "read-only",
    "non-coherent-read",
    "shared-race",
    "divergent-barrier",
    "divergent-warp",
    "async-copy-unwaited",
    "step-limit",
    "trap",
]


class PtxError(Exception):
    """A kernel that cannot be parsed or that did something a GPU would not forgive.

    Our own kernels raise it only if they have a bug, so it is none of the errors that a request can be blamed for.

    ``kind`` says what; ``block`` and ``thread`` are (x, y, z) of the first offender, None where no single thread is to
    blame; ``line`` is the line of the PTX text and ``text`` the instruction there; ``source`` is "file:line" of the
    Python source where the compiler recorded it.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        kernel: str,
        line: int | None = None,
        text: str = "",
        source: str | None = None,
        block: tuple[int, int, int] | None = None,
        thread: tuple[int, int, int] | None = None,
    ) -> None:
        where = [f"kernel {kernel}"]
        if block is not None:
            where.append(f"block {block}")
        if thread is not None:
            where.append(f"thread {thread}")
        if line is not None:
            where.append(f"PTX line {line}: {text}" if text else f"PTX line {line}")
        if source is not None:
            where.append(f"source {source}")
        super().__init__(f"{kind}: {message} [{'; '.join(where)}]")
        self.kind = kind
        self.kernel = kernel
        self.line = line
        self.text = text
        self.source = source
        self.block = block
        self.thread = thread
