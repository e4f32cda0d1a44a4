"""GGUF files: the same as the gguf package's reader sees, and every lie a header can tell."""

from __future__ import annotations

import random
import re
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from numba_engine.checkpoint.gguf import open_gguf
from numba_engine.errors import CheckpointError, UnsupportedModelError
from numba_engine.formats import FORMATS, Q4_1, Q8_0, Format
from tests.tiny_models import TinyModel, gguf_name, tiny_tensors, write_gguf

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


# ---- what is read ----------------------------------------------------------------------------------------------------


def assert_same_as_the_package_reads(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    with open_gguf(path) as checkpoint:
        keys = [key for key in reader.fields if not key.startswith("GGUF.")]
        assert list(checkpoint.config) == keys
        for key in keys:
            assert checkpoint.config[key] == reader.fields[key].contents(), key
            assert type(checkpoint.config[key]) is type(reader.fields[key].contents()), key
        assert set(checkpoint.tensors) == {tensor.name for tensor in reader.tensors}
        for theirs in reader.tensors:
            ours = checkpoint.tensors[theirs.name]
            assert ours.format.name == theirs.tensor_type.name
            assert ours.shape == tuple(reversed(theirs.shape.tolist()))
            assert np.array_equal(ours.data.reshape(-1), theirs.data.reshape(-1).view(np.uint8))
            assert ours.data.shape == (int(np.prod(ours.shape[:-1])), ours.format.row_bytes(ours.shape[-1]))


@pytest.mark.parametrize("format", list(FORMATS.values()), ids=lambda format: format.name)
def test_tiny_models_are_read_as_the_package_reads_them(tmp_path: Path, format: Format) -> None:
    assert_same_as_the_package_reads(write_gguf(tmp_path / "x.gguf", TinyModel("qwen2"), format=format))


def test_the_demo_model_is_read_as_the_package_reads_it(demo_path: Path) -> None:
    assert_same_as_the_package_reads(demo_path)


def test_every_kind_of_metadata_value(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    values: dict[str, Any] = {"s": "naïve 東京 🙂", "yes": True, "no": False, "strings": ["", "a", "é"], "empty": ""}
    writer.add_string("s", values["s"])
    writer.add_key_value("empty", "", gguf.GGUFValueType.STRING)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_array("strings", values["strings"])
    for bits in (8, 16, 32, 64):
        for kind, value in (("uint", 2**bits - 1), ("int", -(2 ** (bits - 1)))):
            getattr(writer, f"add_{kind}{bits}")(f"{kind}{bits}", value)
            values[f"{kind}{bits}"] = value
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_array("bools", [True, False, True])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -2.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values |= {"f32": float(np.float32(0.1)), "f64": 0.1, "bools": [True, False, True], "ints": [1, -2, 3]}
    values["floats"] = [0.5, -2.0]
    with open_gguf(tmp_path / "x.gguf") as checkpoint:
        read = {key: value for key, value in checkpoint.config.items() if not key.startswith("general.")}
    assert read == values
    assert {type(value) for value in read.values()} == {str, bool, int, float, list}
    assert all(type(item) is bool for item in read["bools"])


def test_formats_can_be_mixed_and_data_is_mapped(tmp_path: Path) -> None:
    model = TinyModel()
    path = write_gguf(tmp_path / "x.gguf", model, format=Q4_1, formats={"token_embd": Q8_0})
    with open_gguf(path) as checkpoint:
        assert checkpoint.tensors["token_embd.weight"].format is Q8_0
        assert checkpoint.tensors["blk.1.ffn_down.weight"].format is Q4_1
        assert checkpoint.tensors["output_norm.weight"].format is FORMATS["F32"]
        assert set(checkpoint.tensors) == {gguf_name(name) for name in tiny_tensors(model)}
        for tensor in checkpoint.tensors.values():
            assert not tensor.data.flags.owndata
            before = tensor.data.copy()
            checkpoint.release(tensor)
            assert np.array_equal(tensor.data, before)


def test_the_demo_model_opens_in_a_moment(demo_path: Path) -> None:
    """98,052 strings; the package's reader takes about 2 s here, this one 0.03 s."""
    started = time.process_time()
    with open_gguf(demo_path):
        pass
    assert time.process_time() - started < 0.8


# ---- hand-made files -------------------------------------------------------------------------------------------------


def text(value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def entry(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def info(name: str, shape: tuple[int, ...], ggml_type: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, ggml_type, offset)


GOOD_ENTRIES = [entry("general.architecture", STRING, text("llama"))]
GOOD_INFOS = [info("a", (32, 2), 0, 0), info("b", (8,), 0, 256)]


def write(
    path: Path,
    entries: list[bytes] = GOOD_ENTRIES,
    infos: list[bytes] = GOOD_INFOS,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    data: bytes = bytes(288),
    alignment: int = 32,
) -> Path:
    counts = (len(infos) if num_tensors is None else num_tensors, len(entries) if num_keys is None else num_keys)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(infos)
    path.write_bytes(header + bytes(-len(header) % alignment) + data)
    return path


def refusal(path: Path) -> CheckpointError:
    """The error of opening a file, having allocated next to nothing."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as raised:
            open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20 + 16 * path.stat().st_size
    assert raised.value.file == str(path)
    return raised.value


def test_the_hand_made_file_is_good(tmp_path: Path) -> None:
    with open_gguf(write(tmp_path / "x.gguf")) as checkpoint:
        assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == {"a": (2, 32), "b": (8,)}


@pytest.mark.parametrize("alignment", [1, 8, 4096])
def test_alignment_is_as_the_file_says(tmp_path: Path, alignment: int) -> None:
    entries = [entry("general.alignment", U32, struct.pack("<I", alignment))]
    data = bytes(range(32))
    path = write(tmp_path / "x.gguf", entries, [info("a", (8,), 0, 0)], alignment=alignment, data=data)
    with open_gguf(path) as checkpoint:
        assert checkpoint.tensors["a"].data.tobytes() == data


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"magic": b"GGML"}, "is not a GGUF file: it begins with b'GGML'"),
        ({"version": 1}, "is GGUF version 1; supported: 2, 3"),
        ({"version": 4}, "is GGUF version 4"),
        ({"version": 0}, "is GGUF version 0"),
        ({"version": 3 << 24}, "is a big-endian GGUF file; convert it"),
        ({"num_keys": 2**63}, "declares 2 tensors and 9223372036854775808 metadata keys; at most 65536"),
        ({"num_tensors": 2**64 - 1}, "declares 18446744073709551615 tensors"),
        ({"num_keys": 60_000, "infos": [], "data": b"", "alignment": 1}, "ends inside a metadata key"),
        ({"num_tensors": 60_000, "infos": [], "data": b"", "alignment": 1}, "ends inside a tensor's name"),
        ({"entries": GOOD_ENTRIES * 2}, "the metadata key 'general.architecture' occurs twice"),
        ({"entries": [entry("k", 13, b"")]}, "metadata key 'k' has the unknown value type 13"),
        ({"entries": [entry("k", STRING, struct.pack("<Q", 2**40))]}, "metadata key 'k' is 1099511627776 bytes"),
        ({"entries": [entry("k", STRING, struct.pack("<Q", 2**20))]}, "ends inside metadata key 'k'"),
        ({"entries": [entry("k", STRING, text(b"\xff\xfe"))]}, "metadata key 'k' is not UTF-8"),
        ({"entries": [text(b"\xff") + struct.pack("<IB", U8, 1)]}, "a metadata key is not UTF-8"),
        ({"entries": [struct.pack("<Q", 2**63)]}, "a metadata key is 9223372036854775808 bytes"),
        ({"entries": [entry("k", ARRAY, struct.pack("<IQ", U8, 2**60))]}, "'k' is a list of 1152921504606846976"),
        ({"entries": [entry("k", ARRAY, struct.pack("<IQ", U64, 2**22))]}, "ends inside metadata key 'k'"),
        ({"entries": [entry("k", ARRAY, struct.pack("<IQ", STRING, 2**22))]}, "ends inside metadata key 'k'"),
        ({"entries": [entry("k", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff"))]}, "'k', item 0, is not UTF-8"),
        ({"entries": [entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]}, "'k' is a list of lists"),
        ({"entries": [entry("k", ARRAY, struct.pack("<IQ", 99, 1))]}, "has the unknown value type 99"),
        ({"entries": [entry("general.alignment", U32, struct.pack("<I", 0))]}, "must be a power of two .* got 0"),
        ({"entries": [entry("general.alignment", U32, struct.pack("<I", 48))]}, "must be a power of two .* got 48"),
        ({"entries": [entry("general.alignment", U32, struct.pack("<I", 2**31))]}, "must be a power of two"),
        ({"entries": [entry("general.alignment", STRING, text("32"))]}, "must be a power of two .* got '32'"),
        ({"entries": [entry("split.count", U16, struct.pack("<H", 3))]}, "split.count = 3 is not supported"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    error = refusal(write(tmp_path / "x.gguf", **options))
    assert re.search(says, str(error)), str(error)


@pytest.mark.parametrize(
    ("infos", "tensor", "says"),
    [
        ([info("a", (), 0, 0)], "a", "has 0 dimensions"),
        ([info("a", (1, 1, 1, 1, 1), 0, 0)], "a", "has 5 dimensions"),
        ([text("a") + struct.pack("<I", 2**31)], "a", "has 2147483648 dimensions"),
        ([info("a", (0,), 0, 0)], "a", r"has the shape \(0,\)"),
        ([info("a", (2**63, 2), 0, 0)], "a", "has the shape"),
        ([info("a", (2**32, 2**32), 0, 0)], "a", "ends at byte 73786976294838206"),
        ([info("a", (33,), 8, 0)], "a", "has rows of 33 values; Q8_0 needs multiples of 32"),
        ([info("a", (8,), 0, 4)], "a", "begins at offset 4, not a multiple of 32"),
        ([info("a", (8,), 0, 2**62)], "a", "ends at byte 4611686018427388"),
        ([info("a", (8,), 0, 2**64 - 32)], "a", "ends at byte 18446744073709551"),
        ([info("a", (73,), 0, 0)], "a", "it is truncated or its header is wrong"),
        ([info("a", (16,), 0, 0), info("b", (8,), 0, 32)], "b", "inside the tensor before it"),
        ([info("b", (8,), 0, 0), info("a", (16,), 0, 0)], "a", "inside the tensor before it"),
        ([info("a", (8,), 0, 0), info("a", (8,), 0, 32)], "a", "occurs twice"),
        ([text(b"\xfe")], None, "a tensor's name is not UTF-8"),
        ([struct.pack("<Q", 2**50)], None, "a tensor's name is 1125899906842624 bytes"),
    ],
)
def test_a_tensor_that_lies(tmp_path: Path, infos: list[bytes], tensor: str | None, says: str) -> None:
    error = refusal(write(tmp_path / "x.gguf", infos=infos))
    assert re.search(says, str(error)), str(error)
    assert error.tensor == tensor


@pytest.mark.parametrize(("ggml_type", "named"), [(13, "Q5_K"), (11, "Q3_K"), (6, "Q5_0"), (26, "I32"), (999, 999)])
def test_a_ggml_type_that_is_not_supported_is_named(tmp_path: Path, ggml_type: int, named: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"ggml type of tensor 'a' = .* F32, F16, BF16, Q8_0") as raised:
        open_gguf(write(tmp_path / "x.gguf", infos=[info("a", (256,), ggml_type, 0)]))
    assert raised.value.value == named


# ---- damaged files ---------------------------------------------------------------------------------------------------


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", TinyModel(num_layers=1)).read_bytes()
    with open_gguf(tmp_path / "whole.gguf") as checkpoint:
        data_bytes = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    header_bytes = len(whole) - data_bytes
    sizes = {*range(1, 400), *range(400, header_bytes, 97), header_bytes + data_bytes // 2, len(whole) - 33}
    for size in sorted(sizes):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"ends inside|is truncated"):
            open_gguf(tmp_path / "cut.gguf")


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    entries = [
        *GOOD_ENTRIES,
        entry("n", U32, struct.pack("<I", 7)),
        entry("tokens", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("bc") + text("é")),
        entry("scores", ARRAY, struct.pack("<IQ3f", F32, 3, 1, 2, 3)),
        entry("flags", ARRAY, struct.pack("<IQ3B", BOOL, 3, 1, 0, 1)),
        entry("general.alignment", U32, struct.pack("<I", 32)),
    ]
    whole = write(tmp_path / "x.gguf", entries).read_bytes()
    refused = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(whole) - 288)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        (tmp_path / "x.gguf").write_bytes(damaged)
        try:
            with open_gguf(tmp_path / "x.gguf") as checkpoint:
                for tensor in checkpoint.tensors.values():
                    assert tensor.data.nbytes <= 288
                    tensor.data.sum()
        except CheckpointError:
            refused += 1
    assert refused > 100
