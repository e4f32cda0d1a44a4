"""Safetensors files and directories of them: what is read, and every lie a header can tell."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from numba_engine.checkpoint import open_checkpoint
from numba_engine.checkpoint.safetensors import read_safetensors
from numba_engine.errors import CheckpointError, UnsupportedModelError
from numba_engine.formats import BF16, F16, F32, Format, dequantize, quantize
from tests.tiny_models import TinyModel, tiny_tensors, write_hf, write_safetensors

TWO = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def write(path: Path, header: Any, data: bytes = bytes(range(32)), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "matrix": rng.standard_normal((7, 33)).astype(np.float32),
        "half": rng.standard_normal((3, 5, 2)).astype(np.float16),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", {"format": "np"})
    tensors = {name: tensor for name, (tensor, _) in read_safetensors(tmp_path / "x.safetensors").items()}
    assert tensors.keys() == arrays.keys()
    for name, values in arrays.items():
        assert tensors[name].shape == values.shape
        assert np.array_equal(dequantize(tensors[name]), values)
    assert tensors["matrix"].data.shape == (7, 33 * 4)
    assert tensors["half"].data.shape == (15, 4)
    assert tensors["scalar"].data.shape == (1, 4)


def test_the_safetensors_package_reads_what_the_tests_write(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"m": quantize("m", np.arange(6).reshape(2, 3), BF16)})
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as file:
        assert file.get_slice("m").get_dtype() == "BF16"


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("format", [F32, F16, BF16], ids=lambda f: f.name)
def test_a_checkpoint_is_read_as_written(tmp_path: Path, format: Format, num_shards: int) -> None:
    model = TinyModel("qwen3")
    write_hf(tmp_path, model, format=format, num_shards=num_shards)
    expected = tiny_tensors(model)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.tensors.keys() == expected.keys()
        for name, values in expected.items():
            tensor = checkpoint.tensors[name]
            assert (tensor.name, tensor.format, tensor.shape) == (name, format, values.shape)
            assert np.array_equal(tensor.data, quantize(name, values, format).data)
            assert Path(checkpoint.file_of(name)).is_file()


def test_data_is_mapped_and_survives_release(tmp_path: Path) -> None:
    write_hf(tmp_path, TinyModel())
    with open_checkpoint(str(tmp_path)) as checkpoint:
        for tensor in checkpoint.tensors.values():
            assert not tensor.data.flags.owndata
            assert not tensor.data.flags.writeable
            before = tensor.data.copy()
            checkpoint.release(tensor)
            assert np.array_equal(tensor.data, before)


@pytest.mark.parametrize(
    ("change", "tensor", "says"),
    [
        (lambda h: h["a"].update(dtype=7), "a", "dtype must be a string, got 7"),
        (lambda h: h["a"].update(shape=[2, 4]), "a", r"shape \[2, 4\] of F32 takes 32 bytes, data_offsets give it 24"),
        (lambda h: h["a"].update(shape=[2**62, 2**62]), "a", "takes 85070591730234615865843651857942052864 bytes"),
        (lambda h: h["a"].update(shape=[2**64, 0]), "a", "shape must be at most 8 counts"),
        (lambda h: h["a"].update(shape=[-2, -3]), "a", "shape must be at most 8 counts"),
        (lambda h: h["a"].update(shape=[2.0, 3]), "a", "shape must be at most 8 counts"),
        (lambda h: h["a"].update(shape=[True, 6]), "a", "shape must be at most 8 counts"),
        (lambda h: h["a"].update(shape=[1] * 7 + [2, 3]), "a", "shape must be at most 8 counts"),
        (lambda h: h["a"].update(shape="23"), "a", "shape must be at most 8 counts"),
        (lambda h: h["a"].pop("shape"), "a", "shape must be at most 8 counts, got None"),
        (lambda h: h["a"].update(data_offsets=[24, 0]), "a", r"data_offsets must be \[begin, end\]"),
        (lambda h: h["a"].update(data_offsets=[0, 24, 32]), "a", r"data_offsets must be \[begin, end\]"),
        (lambda h: h["a"].update(data_offsets=[-24, 0]), "a", r"data_offsets must be \[begin, end\]"),
        (lambda h: h["b"].update(data_offsets=[20, 28]), "b", "overlaps the one before it"),
        (lambda h: h["b"].update(data_offsets=[0, 8]), "a", "overlaps the one before it"),
        (lambda h: h["b"].update(data_offsets=[26, 34]), "b", "ends at byte 34 of the data, the file has 32"),
        (lambda h: h["b"].update(data_offsets=[2**62, 2**62 + 8]), "b", "the file has 32"),
        (lambda h: h.pop("a"), "b", "leaves a gap before it"),
        (lambda h: h.pop("b"), None, "has 8 bytes of data that belong to no tensor"),
        (lambda h: h.update(a=[1, 2]), "a", "header entry must be an object"),
    ],
)
def test_a_header_that_lies(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], tensor: str | None, says: str
) -> None:
    header = json.loads(json.dumps(TWO))
    change(header)
    path = write(tmp_path / "x.safetensors", header)
    with pytest.raises(CheckpointError, match=says) as raised:
        read_safetensors(path)
    assert raised.value.tensor == tensor
    assert raised.value.file == str(path)


@pytest.mark.parametrize("dtype", ["I8", "I32", "F8_E4M3", "F64", "BOOL", "Q4_0"])
def test_a_dtype_that_is_not_supported_is_named(tmp_path: Path, dtype: str) -> None:
    path = write(tmp_path / "x.safetensors", {"a": {"dtype": dtype, "shape": [32], "data_offsets": [0, 32]}})
    with pytest.raises(
        UnsupportedModelError, match=f"dtype of tensor 'a' = '{dtype}' .* supported: F32, F16, BF16"
    ) as raised:
        read_safetensors(path)
    assert raised.value.value == dtype


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"1234567", "is truncated: 7 bytes"),
        (struct.pack("<Q", 2) + b"", "a header of 2 bytes in a file of 8"),
        (struct.pack("<Q", 2**63) + b"{}", "a header of 9223372036854775808 bytes in a file of 10"),
        (struct.pack("<Q", 0) + b"{}", "a header of 0 bytes"),
        (struct.pack("<Q", 2) + b"[]", "must hold a JSON object, got list"),
        (struct.pack("<Q", 4) + b"{,,}", "is not valid JSON"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}", "is not valid JSON"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "is not valid JSON"),
        (struct.pack("<Q", 15) + b'{"a":{},"a":{}}', "the key 'a' occurs twice"),
        (struct.pack("<Q", 10_008) + b'{"a":' + b"9" * 10_000 + b"} " + b" ", "is not valid JSON"),
        (b"GGUF" + bytes(60), "is not a safetensors file, or truncated"),
    ],
    ids=lambda value: value[:30].decode("ascii", "replace") if isinstance(value, bytes) else None,
)
def test_not_a_safetensors_file(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=says):
        read_safetensors(tmp_path / "x.safetensors")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.safetensors", TWO).read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut.safetensors").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
            read_safetensors(tmp_path / "cut.safetensors")


def test_flipped_bytes_are_read_or_refused(tmp_path: Path) -> None:
    rng = random.Random(0)
    whole = write(tmp_path / "x.safetensors", TWO).read_bytes()
    refused = 0
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(whole) - 32)] = rng.randrange(256)
        (tmp_path / "x.safetensors").write_bytes(damaged)
        try:
            for tensor, _ in read_safetensors(tmp_path / "x.safetensors").values():
                assert dequantize(tensor).shape == tensor.shape
        except CheckpointError:
            refused += 1
    assert refused > 200


# ---- the index of a sharded checkpoint -------------------------------------------------------------------------------


def edit_index(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    "shard",
    [
        *("../evil.safetensors", "/etc/passwd", "/tmp/x.safetensors", "a/b.safetensors", "..\\x.safetensors", ".."),
        *("", 5, None, ["x"], "x.bin", ".hidden.safetensors", "a\0.safetensors"),
    ],
)
def test_shard_names_stay_in_the_directory(tmp_path: Path, shard: object) -> None:
    directory = write_hf(tmp_path / "m", TinyModel(), num_shards=2)
    write_safetensors(tmp_path / "evil.safetensors", {})
    edit_index(directory, lambda index: index["weight_map"].update({"model.norm.weight": shard}))
    with pytest.raises(CheckpointError, match=r"a file name ending in \.safetensors, without a folder") as raised:
        open_checkpoint(str(directory))
    assert raised.value.tensor == "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda i: i.pop("weight_map"), "weight_map must be an object"),
        (lambda i: i.update(weight_map=[]), "weight_map must be an object"),
        (lambda i: i.update(weight_map={}), "weight_map must be an object"),
        (lambda i: i["weight_map"].pop("model.norm.weight"), "'model.norm.weight': is in .* has it nowhere"),
        (lambda i: i["weight_map"].update({"model.norm.weight": FIRST}), f"has it in {FIRST}|is not in {FIRST}"),
        (lambda i: i["weight_map"].update(extra=SECOND), f"'extra': is not in {SECOND}"),
        (lambda i: i["weight_map"].update(extra="model-3.safetensors"), "model-3.safetensors: cannot be read: No such"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, change: Callable[[dict[str, Any]], Any], says: str) -> None:
    write_hf(tmp_path, TinyModel(), num_shards=2)
    edit_index(tmp_path, change)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(str(tmp_path))


def test_the_same_tensor_in_two_shards(tmp_path: Path) -> None:
    write_hf(tmp_path, TinyModel(), num_shards=2)
    (tmp_path / FIRST).write_bytes((tmp_path / SECOND).read_bytes())
    with pytest.raises(CheckpointError, match=f"is in {FIRST}, but model.safetensors.index.json has it in {SECOND}"):
        open_checkpoint(str(tmp_path))


def test_damaged_json_files_are_named(tmp_path: Path) -> None:
    write_hf(tmp_path, TinyModel(), num_shards=2)
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        good = (tmp_path / name).read_bytes()
        for bad in (b"", b"{", b"[1]", b"\xff", b'{"a": 1, "a": 2}'):
            (tmp_path / name).write_bytes(bad)
            with pytest.raises(CheckpointError, match=name):
                open_checkpoint(str(tmp_path))
        (tmp_path / name).write_bytes(good)
