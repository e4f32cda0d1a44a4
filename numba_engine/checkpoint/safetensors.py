"""Hugging Face directories: config.json and its companions, and safetensors files, one or sharded.

A safetensors file is a u64 length, a JSON header of that length, and the data
(https://github.com/huggingface/safetensors, "Format"). The header is read here rather than by the safetensors package
because that hands out no bfloat16 without a copy, and because what is wrong with a file should be said in full.
"""

from __future__ import annotations

import json
import math
import stat
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from numba_engine.checkpoint.checkpoint import Checkpoint
from numba_engine.checkpoint.mapped_file import MappedFile
from numba_engine.errors import CheckpointError, UnsupportedModelError
from numba_engine.formats import BF16, F16, F32, Format, StoredTensor

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package
_MAX_JSON_BYTES = 64 << 20
_MAX_DIMENSIONS = 8
_FORMATS = {"F32": F32, "F16": F16, "BF16": BF16}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"

_Tensors = dict[str, tuple[StoredTensor, MappedFile]]


def open_huggingface(directory: Path) -> Checkpoint:
    """Open a directory that holds config.json and safetensors files.

    Raises:
        CheckpointError: a file is missing, truncated or inconsistent.
        UnsupportedModelError: a tensor's dtype is not one of BF16, F16, F32.
    """
    config = read_json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation_config = read_json(generation_path) if generation_path.exists() else {}
    if (directory / _SINGLE).exists():
        tensors = read_safetensors(directory / _SINGLE)
    elif (directory / _INDEX).exists():
        tensors = _read_shards(directory / _INDEX)
    else:
        raise CheckpointError(_why_no_weights(directory), file=str(directory))
    return Checkpoint(
        "hf",
        directory,
        name=_model_name(directory.resolve()),
        config=config,
        generation_config=generation_config,
        tensors=tensors,
    )


def _model_name(directory: Path) -> str:
    """The directory's name; in the Hugging Face cache, ``models--owner--name/snapshots/<revision>``, owner/name."""
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return directory.name


def _why_no_weights(directory: Path) -> str:
    wanted = f"needs {_SINGLE}, or {_INDEX} and the files it names"
    found = sorted(path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    if not found:
        return f"has no weights: it {wanted}"
    hint = "" if found[0].endswith(".safetensors") else "; pickled PyTorch weights are not read, save as safetensors"
    return f"{wanted}; found {', '.join(found[:5])}{hint}"


def _read_shards(index_path: Path) -> _Tensors:
    """The tensors of every file that the index names, each where the index says."""
    file = str(index_path)
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("weight_map must be an object that maps tensor names to file names", file=file)
    for name, shard in weight_map.items():
        if not _is_plain_file_name(shard):
            raise CheckpointError(
                f"weight_map names {shard!r}; a file name ending in .safetensors, without a folder, is allowed",
                file=file,
                tensor=name,
            )
    tensors: _Tensors = {}
    for shard in sorted(set(weight_map.values())):
        for name, entry in read_safetensors(index_path.parent / shard).items():
            if weight_map.get(name) != shard:
                where = f"in {weight_map[name]}" if name in weight_map else "nowhere"
                raise CheckpointError(f"is in {shard}, but {_INDEX} has it {where}", file=file, tensor=name)
            tensors[name] = entry
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"is not in {shard}, where {_INDEX} has it", file=file, tensor=name)
    return tensors


def _is_plain_file_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not any(character in name for character in "/\\:\0")
        and not name.startswith(".")
    )


def read_safetensors(path: Path) -> _Tensors:
    """Map one safetensors file and check its header against itself and against the file's size."""
    mapped = MappedFile(path)
    file = str(path)
    if mapped.size < 8:
        raise CheckpointError(f"is truncated: {mapped.size} bytes", file=file)
    (header_bytes,) = struct.unpack_from("<Q", mapped.memory)
    if not 2 <= header_bytes <= min(mapped.size - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(
            f"is not a safetensors file, or truncated: a header of {header_bytes} bytes in a file of {mapped.size}",
            file=file,
        )
    header = parse_json_object(mapped.memory[8 : 8 + header_bytes], file)
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    ranges = {name: _check_entry(name, entry, file) for name, entry in header.items()}
    _check_ranges(((begin, end, name) for name, (_, _, begin, end) in ranges.items()), mapped.size - data_start, file)
    tensors: _Tensors = {}
    for name, (format, shape, begin, end) in ranges.items():
        rows = math.prod(shape[:-1])
        data = mapped.view(data_start + begin, end - begin).reshape(rows, (end - begin) // max(rows, 1))
        tensors[name] = (StoredTensor(name, format, shape, data), mapped)
    return tensors


def _check_entry(name: str, entry: object, file: str) -> tuple[Format, tuple[int, ...], int, int]:
    """Format, shape and byte range of one tensor, agreeing with each other."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"header entry must be an object, got {entry!r:.80}", file=file, tensor=name)
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not _is_counts(shape) or len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(
            f"shape must be at most {_MAX_DIMENSIONS} counts, got {shape!r:.80}", file=file, tensor=name
        )
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"data_offsets must be [begin, end], got {offsets!r:.80}", file=file, tensor=name)
    if not isinstance(dtype, str):
        raise CheckpointError(f"dtype must be a string, got {dtype!r:.80}", file=file, tensor=name)
    format = _FORMATS.get(dtype)
    if format is None:
        raise UnsupportedModelError(f"dtype of tensor {name!r}", dtype, ", ".join(_FORMATS), file=file)
    begin, end = offsets
    num_bytes = math.prod(shape) * format.block_bytes
    if num_bytes != end - begin:
        raise CheckpointError(
            f"shape {shape} of {dtype} takes {num_bytes} bytes, data_offsets give it {end - begin}",
            file=file,
            tensor=name,
        )
    return format, tuple(shape), begin, end


def _check_ranges(ranges: Iterable[tuple[int, int, str]], data_bytes: int, file: str) -> None:
    """The tensors fill the data without gap or overlap, as the format demands."""
    position = 0
    for begin, end, name in sorted(ranges):
        if end > data_bytes:
            raise CheckpointError(
                f"ends at byte {end} of the data, the file has {data_bytes}: it is truncated or its header is wrong",
                file=file,
                tensor=name,
            )
        if begin != position:
            trouble = "overlaps the one before it" if begin < position else "leaves a gap before it"
            raise CheckpointError(
                f"{trouble}: it begins at byte {begin} of the data instead of {position}", file=file, tensor=name
            )
        position = end
    if position != data_bytes:
        raise CheckpointError(f"has {data_bytes - position} bytes of data that belong to no tensor", file=file)


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, too large, not JSON, or not an object.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError("is not a regular file", file=str(path))
        if status.st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"is {status.st_size} bytes; at most {_MAX_JSON_BYTES} are read", file=str(path))
        return parse_json_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", file=str(path)) from None


def parse_json_object(text: bytes, file: str) -> dict[str, Any]:
    """A JSON object from the text of a file. Raises CheckpointError where it is not JSON, or not an object."""
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON: {error}", file=file) from None
    if not isinstance(value, Mapping):
        raise CheckpointError(f"must hold a JSON object, got {type(value).__name__}", file=file)
    return dict(value)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} occurs twice")
    return result
