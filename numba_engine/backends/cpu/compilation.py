"""Compiling kernels and keeping them on disk.

numba's own ``cache=True`` notices edits to the file a function is in, not to the helpers it calls. Here every compiled
function lives in a folder named after a hash of all sources of this package, of the formats and of the numba version,
so an edit or an upgrade anywhere starts afresh and stale code cannot be loaded. The folder is in the user's cache
directory, so the package itself may be read-only; if no folder is writable, nothing is kept and everything still works.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import platformdirs
from numba.core import bytecode, caching, ccallback, sigutils
from numba.core.registry import CPUDispatcher

from numba_engine import formats
from numba_engine.backends.kept_kernels import warn_not_kept

_PACKAGE = Path(__file__).parent
_FORMATS = Path(formats.__file__).parent

# numba tells functions of one name apart by a counter that begins at 1 in every process. The counter becomes part of
# their symbols, so kernels that two processes compiled and kept could define one symbol twice, and a third process that
# loads both would run the wrong function. A random beginning makes symbols unique across processes.
bytecode.FunctionIdentity._unique_ids = itertools.count(secrets.randbits(60))


def launcher(function: Callable[..., Any], variant: str = "") -> CPUDispatcher:
    """Compile a function that is called from Python: without the GIL, kept on disk.

    ``variant`` tells apart functions of one name made by a factory, which differ in what they close over.
    """
    dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
    _enable_cache(dispatcher, function, variant)
    return dispatcher


inner = numba.njit(error_model="numpy", inline="never")
"""Compile a function that only other compiled functions call; kept on disk as a part of them."""


def kernel_address(function: Callable[..., Any], signature: str, variant: str = "") -> int:
    """Compile ``function`` for C callers and return its address.

    ``variant`` as for ``launcher``. The code lives as long as the process.
    """
    args, result = sigutils.normalize_signature(signature)
    compiled = ccallback.CFunc(function, (args, result), {}, {"nopython": True, "error_model": "numpy"})
    _enable_cache(compiled, function, variant)
    compiled.compile()
    _keep_alive.append(compiled)
    address = compiled.address
    assert address
    return address


_keep_alive: list[ccallback.CFunc] = []


def _enable_cache(compiled: Any, function: Callable[..., Any], variant: str) -> None:
    if cache_folder() is not None:
        compiled._cache = _KernelCache(function, variant)
    else:
        warn_not_kept("no folder for them can be written")


@functools.cache
def cache_folder() -> Path | None:
    """Where compiled kernels of exactly these sources are kept; None if nowhere is writable."""
    digest = hashlib.sha256(numba.__version__.encode())
    for package in (_PACKAGE, _FORMATS):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    name = f"kernels/{digest.hexdigest()[:24]}"
    for find_root in (_user_folder, _temporary_folder):
        try:
            root = find_root()
            folder = root / name
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not all(_is_ours(path) for path in (root, root / "kernels", folder)):
                continue
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        return folder
    return None


def _user_folder() -> Path:
    return Path(platformdirs.user_cache_dir("numba-engine", appauthor=False))


def _temporary_folder() -> Path:
    """Of this user. Raises FileNotFoundError where no folder has room, as on a full disk."""
    return Path(tempfile.gettempdir()) / f"numba-engine-{os.getuid() if hasattr(os, 'getuid') else 0}"


def _is_ours(folder: Path) -> bool:
    """Nobody else can put code there: compiled code is trusted."""
    if not hasattr(os, "getuid"):
        return True
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & stat.S_IWOTH


class _Locator(caching._CacheLocator):
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        return cls(py_func)

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return "the folder's name is the stamp"

    def get_disambiguator(self) -> str:
        return str(self._function.__code__.co_firstlineno)


class _Impl(caching.CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class _KernelCache(caching.FunctionCache):
    _impl_class = _Impl

    def __init__(self, function: Callable[..., Any], variant: str) -> None:
        self._variant = variant
        super().__init__(function)
        if variant:
            self._cache_file = caching.IndexDataCacheFile(
                self._cache_path, f"{self._impl.filename_base}-{variant}", self._impl.locator.get_source_stamp()
            )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            # A file that a power cut truncated raises whatever unpickling or LLVM make of it, and would do so for ever.
            # Or the folder has gone away while the process runs. Compiled anew, it is kept anew.
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:  # nor need there be room for it: then the next process compiles again
            warn_not_kept(error)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (sig, codegen.magic_tuple(), self._variant)
