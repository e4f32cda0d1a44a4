"""Opcode → decoder. A decoder turns an instruction into a function of the executing lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from numba_engine.backends.ptx.parser import Instruction

if TYPE_CHECKING:
    from numba_engine.backends.ptx.lanes import Mask
    from numba_engine.backends.ptx.machine import Machine

Op = Callable[["Mask"], None]
Decoder = Callable[["Machine", Instruction], "Op | None"]

_DECODERS: dict[str, Decoder] = {}


def opcode(*names: str) -> Callable[[Decoder], Decoder]:
    """Register a decoder. It returns None for what has no effect here, such as a cache hint.

    TypeError, LookupError, ValueError and StopIteration it raises mean a form that is not supported.
    """

    def register(decoder: Decoder) -> Decoder:
        for name in names:
            assert name not in _DECODERS, name
            _DECODERS[name] = decoder
        return decoder

    return register


def lookup(name: str) -> Decoder | None:
    return _DECODERS.get(name)


def known_opcodes() -> frozenset[str]:
    return frozenset(_DECODERS)
