"""Tiny random models of every supported architecture, written as the files real ones come in.

``TinyModel`` says what the model is; ``write_hf`` and ``write_gguf`` write the same weights into either container.
Weights are large enough that logits spread (standard deviation about 2) and attention is far from uniform.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from numba_engine.formats import BF16, F16, F32, Format, StoredTensor, dequantize, quantize
from numba_engine.model.config import Llama3RopeScaling

SPECIAL_TOKENS = ("<|begin|>", "<|im_start|>", "<|im_end|>")
"""Token ids 0, 1 and 2; the first begins texts, the last ends answers."""

BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3_ROPE = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
"""Scaled so that a tiny head has frequencies that are kept, blended and stretched."""

_HF_CLASS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SAFETENSORS_DTYPE = {F32: "F32", F16: "F16", BF16: "BF16"}
_TORCH_DTYPE = {F32: "float32", F16: "float16", BF16: "bfloat16"}


@dataclass(frozen=True)
class TinyModel:
    """A model, as numbers. Biases (qwen2) and q/k norms (qwen3) come with the architecture."""

    architecture: str = "llama"
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 331
    """At least as many as the tokenizer has (about 320); the rest are rows without a token, as in Qwen."""
    max_position: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Llama3RopeScaling | None = None
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    seed: int = 0
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    """Entries that replace or extend those of config.json; a value of None removes the entry."""

    @property
    def has_qkv_bias(self) -> bool:
        return self.architecture == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        return self.architecture == "qwen3"


# ---- weights ---------------------------------------------------------------------------------------------------------


def tiny_tensors(model: TinyModel) -> dict[str, np.ndarray]:
    """The weights as float32, by Hugging Face name, matrices ``[out_features, in_features]``."""
    rng = np.random.default_rng(model.seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * gain / math.sqrt(columns)).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    hidden, q_size, kv_size = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    tensors = {"model.embed_tokens.weight": matrix(model.vocab_size, hidden, 2.0)}
    for i in range(model.num_layers):
        layer = f"model.layers.{i}."
        tensors[layer + "input_layernorm.weight"] = norm(hidden)
        for name, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = matrix(rows, hidden, 1.4)
            if model.has_qkv_bias:
                tensors[f"{layer}self_attn.{name}_proj.bias"] = (0.3 * rng.standard_normal(rows)).astype(np.float32)
        if model.has_qk_norm:
            tensors[layer + "self_attn.q_norm.weight"] = norm(model.head_dim)
            tensors[layer + "self_attn.k_norm.weight"] = norm(model.head_dim)
        tensors[layer + "self_attn.o_proj.weight"] = matrix(hidden, q_size)
        tensors[layer + "post_attention_layernorm.weight"] = norm(hidden)
        tensors[layer + "mlp.gate_proj.weight"] = matrix(model.intermediate_size, hidden, 1.4)
        tensors[layer + "mlp.up_proj.weight"] = matrix(model.intermediate_size, hidden)
        tensors[layer + "mlp.down_proj.weight"] = matrix(hidden, model.intermediate_size)
    tensors["model.norm.weight"] = norm(hidden)
    if not model.tie_word_embeddings:
        tensors["lm_head.weight"] = matrix(model.vocab_size, hidden, 2.0)
    return tensors


def store(name: str, values: np.ndarray, format: Format) -> StoredTensor:
    """As converters do: 1-D tensors in F32, and F16 where rows are not whole blocks."""
    if values.ndim == 1:
        return quantize(name, values, F32)
    fits = values.shape[1] % format.block_size == 0
    return quantize(name, values, format if fits else F16)


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


def write_hf(
    directory: Path,
    model: TinyModel,
    *,
    format: Format = F32,
    num_shards: int = 1,
    rounded_to: Format | None = None,
    rope_parameters: bool = False,
    generation_config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint directory with its tokenizer; returns it.

    ``rounded_to`` first rounds the matrices through that format, so that the directory holds exactly the values of
    ``write_gguf(…, format=rounded_to)``. ``rope_parameters`` writes config.json's newer form of the RoPE settings.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, values in tiny_tensors(model).items():
        if rounded_to is not None:
            values = dequantize(store(name, values, rounded_to))
        tensors[name] = quantize(name, values, format)
    _write_shards(directory, tensors, num_shards)
    config = hf_config(model, format=format, rope_parameters=rope_parameters)
    _write_json(directory / "config.json", config)
    if generation_config is None:
        generation_config = {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID}
    _write_json(directory / "generation_config.json", generation_config)
    _write_tokenizer(directory)
    return directory


def hf_config(model: TinyModel, *, format: Format = F32, rope_parameters: bool = False) -> dict[str, Any]:
    """The model's config.json."""
    config: dict[str, Any] = {
        "architectures": [_HF_CLASS[model.architecture]],
        "model_type": model.architecture,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        "rms_norm_eps": model.rms_norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": _TORCH_DTYPE[format],
    }
    scaling: dict[str, Any] | None = None
    if model.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": model.rope_scaling.factor,
            "low_freq_factor": model.rope_scaling.low_freq_factor,
            "high_freq_factor": model.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": model.rope_scaling.original_max_position,
        }
    if rope_parameters:
        config["rope_parameters"] = {"rope_type": "default", **(scaling or {}), "rope_theta": model.rope_theta}
    else:
        config |= {"rope_theta": model.rope_theta, "rope_scaling": scaling}
    if model.architecture == "mistral":
        config["sliding_window"] = model.sliding_window
    elif model.architecture in ("qwen2", "qwen3"):
        windowed = model.sliding_window is not None
        config |= {"use_sliding_window": windowed, "sliding_window": model.sliding_window or 4096}
        config["max_window_layers"] = 0 if windowed else model.num_layers
    config |= model.hf_config
    return {key: value for key, value in config.items() if key not in model.hf_config or value is not None}


def write_safetensors(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """One safetensors file: u64 length, JSON header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _SAFETENSORS_DTYPE[tensor.format],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.data).tobytes())


def _write_shards(directory: Path, tensors: Mapping[str, StoredTensor], num_shards: int) -> None:
    if num_shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return
    weight_map = {}
    names = list(tensors)
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        mine = names[shard::num_shards]
        weight_map |= dict.fromkeys(mine, file)
        write_safetensors(directory / file, {name: tensors[name] for name in mine})
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _write_tokenizer(directory: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": SPECIAL_TOKENS[BOS_TOKEN_ID], "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID]}
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 512,
            "chat_template": CHAT_TEMPLATE,
            **named,
        },
    )
    _write_json(directory / "special_tokens_map.json", named)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def write_gguf(
    path: Path,
    model: TinyModel,
    *,
    format: Format = F32,
    formats: Mapping[str, Format] | None = None,
) -> Path:
    """Write the model as llama.cpp's converter would; returns the path.

    ``formats`` overrides the format of the matrices whose GGUF name contains its key, such as ``{"attn_v": Q8_0}``.
    Mistral becomes architecture ``llama``; the q and k rows of that architecture are interleaved.
    """
    architecture = "llama" if model.architecture == "mistral" else model.architecture
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, model)
    _add_gguf_tokenizer(writer, model.vocab_size)
    for hf_name, values in tiny_tensors(model).items():
        name = gguf_name(hf_name)
        if architecture == "llama" and ".attn_q." in name:
            values = interleave_rows(values, model.num_heads)
        if architecture == "llama" and ".attn_k." in name:
            values = interleave_rows(values, model.num_kv_heads)
        chosen = next((f for key, f in (formats or {}).items() if key in name), format)
        _add_tensor(writer, store(name, values, chosen))
    if model.rope_scaling is not None:
        factors = llama3_frequency_divisors(model)
        _add_tensor(writer, quantize("rope_freqs.weight", factors, F32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(hf_name: str) -> str:
    """A tensor's name in GGUF, as the gguf package maps it."""
    base, _, suffix = hf_name.rpartition(".")
    mapped = _gguf_names().get_name(base)
    assert mapped is not None, hf_name
    return f"{mapped}.{suffix}"


@cache
def _gguf_names() -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 64)  # of ours, the one that has them all


def interleave_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i and row i + D/2 of each head become neighbours: the order llama.cpp's llama rotates in."""
    paired = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)


def llama3_frequency_divisors(model: TinyModel) -> np.ndarray:
    """``rope_freqs.weight``: what each of the D/2 frequencies is divided by, as llama.cpp's converter computes it."""
    scaling = model.rope_scaling
    assert scaling is not None
    divisors = []
    for i in range(0, model.head_dim, 2):
        wavelength = 2 * math.pi * model.rope_theta ** (i / model.head_dim)
        if wavelength < scaling.original_max_position / scaling.high_freq_factor:
            divisors.append(1.0)
        elif wavelength > scaling.original_max_position / scaling.low_freq_factor:
            divisors.append(scaling.factor)
        else:
            smooth = scaling.original_max_position / wavelength - scaling.low_freq_factor
            smooth /= scaling.high_freq_factor - scaling.low_freq_factor
            divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(divisors, dtype=np.float32)


def _add_metadata(writer: gguf.GGUFWriter, model: TinyModel) -> None:
    writer.add_name(f"tiny {model.architecture}")
    writer.add_block_count(model.num_layers)
    writer.add_context_length(model.max_position)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_vocab_size(model.vocab_size)
    if model.sliding_window is not None:
        writer.add_sliding_window(model.sliding_window)


def _add_gguf_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    definition = json.loads(tiny_tokenizer().to_str())
    tokens = [token for token, _ in sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])]
    types = [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    padding = vocab_size - len(tokens)
    assert padding >= 0, f"the tokenizer has {len(tokens)} tokens"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + [f"[PAD{len(tokens) + i}]" for i in range(padding)])
    writer.add_token_types(types + [gguf.TokenType.UNUSED] * padding)
    writer.add_token_merges([" ".join(pair) for pair in definition["model"]["merges"]])
    writer.add_bos_token_id(BOS_TOKEN_ID)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tensor(writer: gguf.GGUFWriter, tensor: StoredTensor) -> None:
    data = tensor.data if len(tensor.shape) > 1 else tensor.data[0]
    writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType[tensor.format.name])


# ---- tokenizer -------------------------------------------------------------------------------------------------------

_TRAINING_TEXT = (
    "the quick brown fox jumps over the lazy dog and then the other dog jumps over the fox",
    "def forward(x): return x + 1  # in the beginning there was the word, and the word was in the vocabulary",
    "el rápido zorro marrón salta sobre el perro perezoso; naïve café, 東京, 🙂🙃",
    "system user assistant: what is there to say of the weather? there is rain, then sun, then rain again.",
)


@cache
def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE of about 320 tokens: the special ones, 256 bytes, and merges learned from a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    return tokenizer
