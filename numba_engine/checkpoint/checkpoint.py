"""What is known of a model file once it is open: facts and tensors, still as the file has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from numba_engine.checkpoint.mapped_file import MappedFile
from numba_engine.formats import Format, StoredTensor


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A stored tensor without its values."""

    name: str
    format: Format
    shape: tuple[int, ...]
    nbytes: int


class Checkpoint:
    """An open model file or directory. Tensors are views of mapped files and are gone after ``close()``."""

    kind: Literal["hf", "gguf"]
    path: Path
    """The directory (hf) or the file (gguf)."""
    name: str
    config: Mapping[str, Any]
    """config.json (hf) or the metadata (gguf), as plain Python values, unchecked."""
    generation_config: Mapping[str, Any]
    """generation_config.json; empty where there is none."""
    tensors: Mapping[str, StoredTensor]
    """By the name the file gives them."""

    def __init__(
        self,
        kind: Literal["hf", "gguf"],
        path: Path,
        *,
        name: str,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any],
        tensors: Mapping[str, tuple[StoredTensor, MappedFile]],
    ) -> None:
        self.kind = kind
        self.path = path
        self.name = name.encode(errors="replace").decode()  # of a path, whose bytes may be no UTF-8
        self.config = config
        self.generation_config = generation_config
        self.tensors = {key: tensor for key, (tensor, _) in tensors.items()}
        self._files = {key: file for key, (_, file) in tensors.items()}

    @property
    def headers(self) -> tuple[TensorHeader, ...]:
        """Of all tensors. They outlive ``close()``."""
        return tuple(TensorHeader(key, t.format, t.shape, t.nbytes) for key, t in self.tensors.items())

    def file_of(self, tensor_name: str) -> str:
        """The file that holds a tensor; the checkpoint's path for a tensor it does not have."""
        file = self._files.get(tensor_name)
        return str(file.path if file else self.path)

    def release(self, tensor: StoredTensor) -> None:
        """Give the memory of a tensor of this checkpoint back, once it has been copied. It can be read again."""
        self._files[tensor.name].release(tensor.data)

    def close(self) -> None:
        """Unmap the files."""
        files = set(self._files.values())
        self.tensors, self._files = {}, {}
        for file in files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
