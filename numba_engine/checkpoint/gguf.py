"""GGUF files, the container of llama.cpp (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Constants come from the ``gguf`` package. Its reader is not used: it makes several array objects of every token and
slices past the end of a truncated file without noticing.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType

from numba_engine.checkpoint.checkpoint import Checkpoint
from numba_engine.checkpoint.mapped_file import MappedFile
from numba_engine.errors import CheckpointError, UnsupportedModelError
from numba_engine.formats import FORMATS, Format, StoredTensor

_VERSIONS = (2, 3)
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 1 << 16
_MAX_STRING_BYTES = 1 << 24
_MAX_ARRAY_LENGTH = 1 << 24
_MAX_ALIGNMENT = 1 << 20

_FORMATS = {ggml_type: FORMATS[ggml_type.name] for ggml_type in GGMLQuantizationType if ggml_type.name in FORMATS}
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


def is_gguf(path: Path) -> bool:
    """Whether it is a regular file that begins as a GGUF file does, whatever its name. Raises OSError."""
    if not path.is_file():  # opening a pipe would wait for its other end
        return False
    with path.open("rb") as file:
        return file.read(4) == GGUF_MAGIC.to_bytes(4, "little")


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file: metadata as plain Python values, tensors as views.

    Raises:
        CheckpointError: the file is truncated or inconsistent.
        UnsupportedModelError: a tensor has a ggml type that the engine does not have, or the file is one of a split.
    """
    mapped = MappedFile(path)
    reader = _Reader(mapped)
    num_tensors, num_keys = _read_counts(reader)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.string("a metadata key", _MAX_NAME_BYTES)
        if key in metadata:
            raise reader.error(f"the metadata key {key!r} occurs twice")
        metadata[key] = reader.value(key)
    if metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(
            "split.count", metadata["split.count"], "one file (join with llama-gguf-split --merge)", file=str(path)
        )
    infos = [_read_tensor_info(reader) for _ in range(num_tensors)]
    alignment = _check_alignment(reader, metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT))
    data_start = -(-reader.position // alignment) * alignment
    tensors = _locate_tensors(mapped, infos, data_start, alignment)
    return Checkpoint("gguf", path, name=path.stem, config=metadata, generation_config={}, tensors=tensors)


def _read_counts(reader: _Reader) -> tuple[int, int]:
    """Number of tensors and of metadata keys, after magic and version."""
    magic, version = reader.numbers("<II", "the header")
    if magic != GGUF_MAGIC:
        raise reader.error(f"is not a GGUF file: it begins with {magic.to_bytes(4, 'little')!r} instead of b'GGUF'")
    if version & 0xFFFF == 0 and version:
        raise reader.error("is a big-endian GGUF file; convert it to little-endian (gguf-convert-endian)")
    if version not in _VERSIONS:
        raise reader.error(f"is GGUF version {version}; supported: {', '.join(map(str, _VERSIONS))}")
    num_tensors, num_keys = reader.numbers("<QQ", "the header")
    if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
        raise reader.error(
            f"declares {num_tensors} tensors and {num_keys} metadata keys; "
            f"at most {_MAX_TENSORS} and {_MAX_KEYS} are read"
        )
    return num_tensors, num_keys


def _read_tensor_info(reader: _Reader) -> tuple[str, tuple[int, ...], Format, int]:
    """Name, shape (outermost first), format and offset from the start of the data."""
    name = reader.string("a tensor's name", _MAX_NAME_BYTES)
    (num_dimensions,) = reader.numbers("<I", f"tensor {name!r}")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise reader.error(f"has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are allowed", tensor=name)
    *reversed_shape, type_id, offset = reader.numbers(f"<{num_dimensions}QIQ", f"tensor {name!r}")
    shape = tuple(reversed(reversed_shape))
    if not all(1 <= size < 2**48 for size in shape):
        raise reader.error(f"has the shape {shape}", tensor=name)
    try:
        ggml_type = GGMLQuantizationType(type_id)
    except ValueError:
        ggml_type = None
    format = _FORMATS.get(ggml_type) if ggml_type is not None else None
    if format is None:
        raise UnsupportedModelError(
            f"ggml type of tensor {name!r}",
            ggml_type.name if ggml_type is not None else type_id,
            ", ".join(FORMATS),
            file=reader.file,
        )
    assert GGML_QUANT_SIZES[ggml_type] == (format.block_size, format.block_bytes)
    if shape[-1] % format.block_size:
        raise reader.error(
            f"has rows of {shape[-1]} values; {format.name} needs multiples of {format.block_size}", tensor=name
        )
    return name, shape, format, offset


def _check_alignment(reader: _Reader, alignment: object) -> int:
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.error(f"general.alignment must be a power of two up to {_MAX_ALIGNMENT}, got {alignment!r:.80}")
    return alignment


def _locate_tensors(
    mapped: MappedFile, infos: list[tuple[str, tuple[int, ...], Format, int]], data_start: int, alignment: int
) -> dict[str, tuple[StoredTensor, MappedFile]]:
    """Views of the tensors' bytes, each inside the file, aligned, and apart from every other."""
    file = str(mapped.path)
    tensors: dict[str, tuple[StoredTensor, MappedFile]] = {}
    previous_end = data_start
    for name, shape, format, offset in sorted(infos, key=lambda info: info[3]):
        if name in tensors:
            raise CheckpointError("occurs twice", file=file, tensor=name)
        rows, row_bytes = math.prod(shape[:-1]), format.row_bytes(shape[-1])
        start = data_start + offset
        end = start + rows * row_bytes
        if offset % alignment:
            raise CheckpointError(f"begins at offset {offset}, not a multiple of {alignment}", file=file, tensor=name)
        if end > mapped.size:
            raise CheckpointError(
                f"ends at byte {end}, the file has {mapped.size}: it is truncated or its header is wrong",
                file=file,
                tensor=name,
            )
        if start < previous_end:
            raise CheckpointError(
                f"begins at byte {start}, inside the tensor before it, which ends at {previous_end}",
                file=file,
                tensor=name,
            )
        data = mapped.view(start, end - start).reshape(rows, row_bytes)
        tensors[name] = (StoredTensor(name, format, shape, data), mapped)
        previous_end = end
    return tensors


class _Reader:
    """Reads the header front to back; every length is checked against the file before anything is read or made."""

    def __init__(self, mapped: MappedFile) -> None:
        self.file = str(mapped.path)
        self.position = 0
        self._memory = mapped.memory
        self._size = mapped.size

    def error(self, message: str, tensor: str | None = None) -> CheckpointError:
        return CheckpointError(message, file=self.file, tensor=tensor)

    def numbers(self, layout: str, what: str) -> tuple[int, ...]:
        """Integers by a ``struct`` layout."""
        start = self._advance(struct.calcsize(layout), what)
        return struct.unpack_from(layout, self._memory, start)

    def string(self, what: str, max_bytes: int) -> str:
        (length,) = self.numbers("<Q", what)
        if length > max_bytes:
            raise self.error(f"{what} is {length} bytes; at most {max_bytes} are read")
        start = self._advance(length, what)
        return self._decode(self._memory[start : start + length], what)

    def value(self, key: str) -> Any:
        """A metadata value: bool, int, float, str, or a list of one of these."""
        what = f"metadata key {key!r}"
        value_type = self._value_type(what)
        if value_type is GGUFValueType.STRING:
            return self.string(what, _MAX_STRING_BYTES)
        if value_type is not GGUFValueType.ARRAY:
            return self._scalars(_SCALARS[value_type], 1, what)[0]
        item_type = self._value_type(what)
        (length,) = self.numbers("<Q", what)
        if length > _MAX_ARRAY_LENGTH:
            raise self.error(f"{what} is a list of {length} values; at most {_MAX_ARRAY_LENGTH} are read")
        if item_type is GGUFValueType.ARRAY:
            raise self.error(f"{what} is a list of lists, which no supported model has")
        if item_type is GGUFValueType.STRING:
            return self._strings(length, what)
        return self._scalars(_SCALARS[item_type], length, what)

    def _value_type(self, what: str) -> GGUFValueType:
        (number,) = self.numbers("<I", what)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.error(f"{what} has the unknown value type {number}") from None

    def _scalars(self, dtype: str, count: int, what: str) -> list[Any]:
        start = self._advance(count * np.dtype(dtype).itemsize, what)
        if dtype == "?":  # any byte but 0 is true; NumPy would keep the byte
            return [byte != 0 for byte in self._memory[start : start + count]]
        return list(np.frombuffer(self._memory, dtype, count, start).tolist())

    def _strings(self, count: int, what: str) -> list[str]:
        """The hot loop of opening: a vocabulary has up to 256k tokens and as many merges."""
        memory, size, position = self._memory, self._size, self.position
        unpack_length = struct.Struct("<Q").unpack_from
        result: list[str] = []
        try:
            for _ in range(count):
                (length,) = unpack_length(memory, position)
                position += 8
                if length > size - position:
                    raise self._truncated(what)
                result.append(memory[position : position + length].decode("utf-8"))
                position += length
        except struct.error:
            raise self._truncated(what) from None
        except UnicodeDecodeError as error:
            raise self.error(f"{what}, item {len(result)}, is not UTF-8: {error}") from None
        self.position = position
        return result

    def _advance(self, num_bytes: int, what: str) -> int:
        """Step over the next bytes; returns where they begin."""
        if num_bytes > self._size - self.position:
            raise self._truncated(what)
        start = self.position
        self.position += num_bytes
        return start

    def _truncated(self, what: str) -> CheckpointError:
        return self.error(f"ends inside {what}: it has {self._size} bytes and is truncated or its header is wrong")

    def _decode(self, text: bytes, what: str) -> str:
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error}") from None
