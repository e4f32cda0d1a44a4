"""Loading: the right rows in the right places, everything checked, memory given back."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from numba_engine.backends.arrays import Segment, Weight
from numba_engine.backends.base import Backend
from numba_engine.checkpoint import open_checkpoint
from numba_engine.errors import CheckpointError
from numba_engine.formats import BF16, F16, F32, FORMATS, Q4_0, Q4_1, Q8_0, Format, StoredTensor, dequantize, quantize
from numba_engine.model.loading import load_weights
from numba_engine.model.read_config import read_config
from numba_engine.model.weights import ModelWeights
from tests.tiny_models import LLAMA3_ROPE, TinyModel, store, tiny_tensors, write_gguf, write_hf, write_safetensors


class CopyingBackend:
    """Keeps copies of what it is given, as stored."""

    def upload(self, host: np.ndarray) -> np.ndarray:
        return host.copy()

    def load_weight(self, name: str, tensors: Sequence[StoredTensor]) -> Weight:
        kept = [replace(tensor, data=tensor.data.copy()) for tensor in tensors]
        segments = tuple(Segment(t.format, t.shape[0], t.nbytes, t) for t in kept)
        return Weight(name, (sum(t.shape[0] for t in kept), kept[0].shape[1]), segments)


def load(path: Path, progress: Callable[[str, int, int], None] | None = None) -> ModelWeights:
    with open_checkpoint(str(path)) as checkpoint:
        config = read_config(checkpoint)
        return load_weights(checkpoint, config, cast(Backend, CopyingBackend()), progress)


def values(weight: Weight) -> np.ndarray:
    return np.concatenate([dequantize(segment.data) for segment in weight.segments])


def assert_holds(weights: ModelWeights, model: TinyModel, tensors: Mapping[str, np.ndarray]) -> None:
    """Every matrix and vector of the model is where the decoder looks for it."""

    def stacked(*names: str) -> np.ndarray:
        return np.concatenate([tensors[name] for name in names])

    assert np.array_equal(values(weights.embed_tokens), tensors["model.embed_tokens.weight"])
    assert np.array_equal(weights.final_norm.weight, tensors["model.norm.weight"])
    if model.tie_word_embeddings:
        assert weights.lm_head is weights.embed_tokens
    else:
        assert np.array_equal(values(weights.lm_head), tensors["lm_head.weight"])
    assert len(weights.layers) == model.num_layers
    for i, layer in enumerate(weights.layers):
        attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        qkv = [f"{attn}{name}_proj." for name in "qkv"]
        assert layer.qkv_proj.shape == (
            (model.num_heads + 2 * model.num_kv_heads) * model.head_dim,
            model.hidden_size,
        )
        assert np.array_equal(values(layer.qkv_proj), stacked(*(name + "weight" for name in qkv)))
        assert np.array_equal(values(layer.o_proj), tensors[attn + "o_proj.weight"])
        gate_up = stacked(mlp + "gate_proj.weight", mlp + "up_proj.weight")
        assert np.array_equal(values(layer.mlp.gate_up_proj), gate_up)
        assert np.array_equal(values(layer.mlp.down_proj), tensors[mlp + "down_proj.weight"])
        assert np.array_equal(layer.attn_norm.weight, tensors[f"model.layers.{i}.input_layernorm.weight"])
        assert np.array_equal(layer.mlp.norm.weight, tensors[f"model.layers.{i}.post_attention_layernorm.weight"])
        if model.has_qkv_bias:
            assert np.array_equal(layer.qkv_bias, stacked(*(name + "bias" for name in qkv)))
        else:
            assert layer.qkv_bias is None
        if model.has_qk_norm:
            assert np.array_equal(layer.q_norm.weight, tensors[attn + "q_norm.weight"])
            assert np.array_equal(layer.k_norm.weight, tensors[attn + "k_norm.weight"])
        else:
            assert layer.q_norm is None
            assert layer.k_norm is None


MODELS = [
    TinyModel("llama", num_heads=6, num_kv_heads=2, head_dim=10, num_layers=3),
    TinyModel("llama", tie_word_embeddings=True, rope_scaling=LLAMA3_ROPE, head_dim=64, num_heads=3, num_kv_heads=1),
    TinyModel("mistral", sliding_window=5),
    TinyModel("qwen2"),
    TinyModel("qwen3", tie_word_embeddings=True, head_dim=80),
]
EVERY_MODEL = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.architecture)


@pytest.mark.parametrize("format", [F32, F16, BF16], ids=lambda f: f.name)
@EVERY_MODEL
def test_hugging_face_weights(tmp_path: Path, model: TinyModel, format: Format) -> None:
    write_hf(tmp_path, model, format=format, num_shards=2)
    rounded = {name: dequantize(quantize(name, value, format)) for name, value in tiny_tensors(model).items()}
    weights = load(tmp_path)
    assert_holds(weights, model, rounded)
    assert weights.layers[0].attn_norm.weight.dtype == np.float32
    assert weights.layers[-1].mlp.down_proj.segments[0].format is format


@pytest.mark.parametrize("format", list(FORMATS.values()), ids=lambda format: format.name)
@EVERY_MODEL
def test_gguf_weights(tmp_path: Path, model: TinyModel, format: Format) -> None:
    if format.block_size > 32:  # rows of whole blocks
        model = replace(model, hidden_size=256, intermediate_size=256, num_layers=1)
    path = write_gguf(tmp_path / "x.gguf", model, format=format)
    rounded = {name: dequantize(store(name, value, format)) for name, value in tiny_tensors(model).items()}
    weights = load(path)
    assert_holds(weights, model, rounded)
    assert weights.layers[0].mlp.gate_up_proj.segments[0].format is format


def test_parts_of_a_stack_keep_their_own_formats(tmp_path: Path) -> None:
    formats = {"attn_v": Q8_0, "ffn_up": F16}
    weights = load(write_gguf(tmp_path / "x.gguf", TinyModel(), format=Q4_0, formats=formats))
    stack = weights.layers[1].qkv_proj
    assert [s.format for s in stack.segments] == [Q4_0, Q4_0, Q8_0]
    assert [s.num_rows for s in stack.segments] == [64, 32, 32]
    assert [s.format for s in weights.layers[1].mlp.gate_up_proj.segments] == [Q4_0, F16]


def test_biases_of_a_gguf_llama_are_in_its_row_order_too(tmp_path: Path) -> None:
    """Fine-tunes of llama with biases exist; the converter interleaves them as it does the rows."""
    model = TinyModel("qwen2")
    path = write_gguf(tmp_path / "q.gguf", model)
    with open_checkpoint(str(path)) as checkpoint:
        config = replace(read_config(checkpoint), architecture="llama")
        weights = load_weights(checkpoint, config, cast(Backend, CopyingBackend()))
    bias = tiny_tensors(model)["model.layers.0.self_attn.q_proj.bias"]
    assert np.array_equal(cast(np.ndarray, weights.layers[0].qkv_bias)[:16], [*bias[0:16:2], *bias[1:16:2]])


def test_the_demo_model(demo_path: Path) -> None:
    weights = load(demo_path)
    assert weights.lm_head is weights.embed_tokens
    assert weights.embed_tokens.shape == (49152, 576)
    assert weights.embed_tokens.segments[0].format is Q8_0
    assert {s.format for layer in weights.layers for s in layer.qkv_proj.segments} == {Q4_1}
    assert len(weights.layers) == 30


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_progress_covers_every_byte(tmp_path: Path, kind: str) -> None:
    path = write_hf(tmp_path, TinyModel()) if kind == "hf" else write_gguf(tmp_path / "x.gguf", TinyModel())
    seen: list[tuple[str, int, int]] = []
    load(path, lambda *step: seen.append(step))
    with open_checkpoint(str(path)) as checkpoint:
        total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    done = [step[1] for step in seen]
    assert {step[2] for step in seen} == {total}
    assert done == sorted(set(done))
    assert done[-1] == total
    assert {"embed_tokens", "layers.1.qkv_proj", "layers.0.mlp_norm"} <= {step[0] for step in seen}


# ---- what is refused -------------------------------------------------------------------------------------------------

Tensors = dict[str, StoredTensor]


def write_changed(directory: Path, model: TinyModel, change: Callable[[Tensors], Any]) -> Path:
    """A checkpoint whose safetensors file has been changed after config.json was written."""
    write_hf(directory, model)
    tensors = {name: quantize(name, value, F32) for name, value in tiny_tensors(model).items()}
    change(tensors)
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


def ones(*shape: int) -> StoredTensor:
    return quantize("", np.ones(shape), F32)


Q1 = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("architecture", "change", "tensor", "says"),
    [
        ("llama", lambda t: t.pop(Q1), Q1, "is missing"),
        ("llama", lambda t: t.pop("lm_head.weight"), "lm_head.weight", "is missing"),
        ("llama", lambda t: t.pop("model.norm.weight"), "model.norm.weight", "is missing"),
        ("qwen2", lambda t: t.pop(Q1[:-6] + "bias"), Q1[:-6] + "bias", "is missing"),
        (
            "qwen3",
            lambda t: t.pop("model.layers.0.self_attn.k_norm.weight"),
            "model.layers.0.self_attn.k_norm.weight",
            "is missing",
        ),
        ("llama", lambda t: t.update({Q1: ones(64, 63)}), Q1, r"has shape \(64, 63\), the config asks for \(64, 64\)"),
        ("llama", lambda t: t.update({Q1: ones(65, 64)}), Q1, r"has shape \(65, 64\)"),
        ("llama", lambda t: t.update({Q1: ones(64 * 64)}), Q1, r"has shape \(4096,\)"),
        ("llama", lambda t: t.update({Q1: ones(64, 64, 1)}), Q1, r"has shape \(64, 64, 1\)"),
        (
            "llama",
            lambda t: t.update({"model.norm.weight": ones(1, 64)}),
            "model.norm.weight",
            r"has shape \(1, 64\), the config asks for \(64,\)",
        ),
        (
            "llama",
            lambda t: t.update({"model.embed_tokens.weight": ones(330, 64)}),
            "model.embed_tokens.weight",
            r"has shape \(330, 64\), the config asks for \(331, 64\)",
        ),
        ("llama", lambda t: t.update({Q1[:-6] + "bias": ones(64)}), Q1[:-6] + "bias", "is not part of a llama model"),
        (
            "llama",
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": ones(96, 64)}),
            "model.layers.2.mlp.up_proj.weight",
            "is not part of a llama model of 2 layers",
        ),
        ("qwen2", lambda t: t.update({"score.weight": ones(2, 64)}), "score.weight", "is not part of a qwen2 model"),
    ],
)
def test_tensors_that_are_not_those_of_the_config(
    tmp_path: Path, architecture: str, change: Callable[[Tensors], Any], tensor: str, says: str
) -> None:
    write_changed(tmp_path, TinyModel(architecture), change)
    with pytest.raises(CheckpointError, match=says) as raised:
        load(tmp_path)
    assert raised.value.tensor == tensor
    assert raised.value.file in (str(tmp_path / "model.safetensors"), str(tmp_path))


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(write_changed(tmp_path / "a", TinyModel(), lambda t: t.update({inv_freq: ones(8)})))
    tied = TinyModel(tie_word_embeddings=True)
    load(write_changed(tmp_path / "b", tied, lambda t: t.update({"lm_head.weight": ones(331, 64)})))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [Q1, "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"])
def test_values_that_are_not_finite(tmp_path: Path, name: str, bad: float) -> None:
    model = TinyModel()

    def spoil(tensors: Tensors) -> None:
        changed = tiny_tensors(model)[name]
        changed.reshape(-1)[-1] = bad
        tensors[name] = quantize(name, changed, F32)

    write_changed(tmp_path, model, spoil)
    with pytest.raises(CheckpointError, match="holds a value that is NaN or infinite") as raised:
        load(tmp_path)
    assert raised.value.tensor == name


@pytest.mark.parametrize("format", [Q8_0, Q4_0, Q4_1], ids=lambda f: f.name)
@pytest.mark.parametrize("name", ["blk.1.attn_k.weight", "blk.0.ffn_down.weight", "output.weight"])
def test_scales_that_are_not_finite(tmp_path: Path, name: str, format: Format) -> None:
    path = write_gguf(tmp_path / "x.gguf", TinyModel(), format=format)
    with open_checkpoint(str(path)) as checkpoint:
        start = path.read_bytes().index(checkpoint.tensors[name].data.tobytes())
        last_block = start + checkpoint.tensors[name].nbytes - format.block_bytes
    with path.open("r+b") as file:
        file.seek(last_block)
        file.write(np.array([np.nan], np.float16).tobytes())
    with pytest.raises(CheckpointError, match=rf"holds a scale that is NaN or infinite \({format.name}\)") as raised:
        load(path)
    assert raised.value.tensor == name
    assert raised.value.file == str(path)


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_flipped_header_bytes_load_or_are_refused(tmp_path: Path, kind: str) -> None:
    rng = random.Random(1)
    model = TinyModel("qwen2", num_layers=1, rope_scaling=None)
    if kind == "hf":
        target, path = write_hf(tmp_path, model) / "model.safetensors", tmp_path
    else:
        target = path = write_gguf(tmp_path / "x.gguf", model, format=Q8_0)
    whole = target.read_bytes()
    header_bytes = int.from_bytes(whole[:8], "little") if kind == "hf" else 12_000
    refusals = []
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(header_bytes)] ^= 1 << rng.randrange(8)
        target.write_bytes(damaged)
        try:
            load(path)
        except CheckpointError as error:
            refusals.append(str(error))
    assert len(refusals) > 40
    assert all(str(tmp_path) in refusal for refusal in refusals)


# ---- memory ----------------------------------------------------------------------------------------------------------

MEASURE = """
    import resource, sys
    import numpy as np
    from tests.checkpoint.test_load_weights import CopyingBackend
    from numba_engine.checkpoint import open_checkpoint
    from numba_engine.model.loading import load_weights
    from numba_engine.model.read_config import read_config

    def peak():
        return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

    before = peak()
    with open_checkpoint(sys.argv[1]) as checkpoint:
        weights = load_weights(checkpoint, read_config(checkpoint), CopyingBackend())
    print(before, peak())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path, kind: str) -> None:
    """Peak resident memory, mapped pages of the file included, against the bytes of the weights (143 MB)."""
    model = TinyModel(hidden_size=1024, intermediate_size=4096, num_layers=4, num_heads=16, head_dim=64)
    if kind == "hf":
        path = write_hf(tmp_path, model, format=BF16)
    else:
        path = write_gguf(tmp_path / "x.gguf", model, format=F16)
    with open_checkpoint(str(path)) as checkpoint:
        weight_bytes = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    root = Path(__file__).parents[2]
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(path)],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert answer.returncode == 0, answer.stderr
    before, peak = map(int, answer.stdout.split())
    assert weight_bytes > 100e6
    assert weight_bytes <= peak - before <= 1.3 * weight_bytes


def test_config_files_are_not_trusted_with_sizes(tmp_path: Path) -> None:
    """A config that asks for more than the files hold is refused before anything is allocated for it."""
    write_hf(tmp_path, TinyModel())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_hidden_layers": 4096, "hidden_size": 1 << 20, "vocab_size": 1 << 24}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"the config asks for|is missing"):
        load(tmp_path)
