"""Every opcode the executor knows is exercised by the tests of this folder."""

from __future__ import annotations

import re
from pathlib import Path

from numba_engine.backends.ptx.counters import CLASS_OF
from numba_engine.backends.ptx.semantics import known_opcodes


def test_every_opcode_occurs_in_a_test() -> None:
    text = "\n".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    missing = [name for name in sorted(known_opcodes()) if not re.search(rf"\b{name}(\.[a-zL{{]|\b[\"'])", text)]
    assert missing == []


def test_every_opcode_has_a_class_for_the_counters() -> None:
    told_by_space = {"ld", "ldu", "st"}
    assert known_opcodes() - CLASS_OF.keys() - told_by_space == set()
