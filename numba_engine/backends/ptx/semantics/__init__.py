"""What each opcode does, by kind. Importing this package registers all of them."""

from numba_engine.backends.ptx.registry import known_opcodes as known_opcodes
from numba_engine.backends.ptx.semantics import async_copy as async_copy
from numba_engine.backends.ptx.semantics import atomics as atomics
from numba_engine.backends.ptx.semantics import compare as compare
from numba_engine.backends.ptx.semantics import convert as convert
from numba_engine.backends.ptx.semantics import floating as floating
from numba_engine.backends.ptx.semantics import half as half
from numba_engine.backends.ptx.semantics import hints as hints
from numba_engine.backends.ptx.semantics import integer as integer
from numba_engine.backends.ptx.semantics import load_store as load_store
from numba_engine.backends.ptx.semantics import matrix as matrix
from numba_engine.backends.ptx.semantics import move as move
from numba_engine.backends.ptx.semantics import warp as warp
