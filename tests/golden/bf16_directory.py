"""A GGUF file of the llama architecture as a Hugging Face directory in bfloat16.

Reads the container and dequantises with the gguf package alone, so that the directory is an independent witness: what
the engine finds in it came through none of the engine's own reading of GGUF.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from numba_engine.formats import BF16, quantize
from tests.tiny_models import write_safetensors

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_bf16_directory(gguf_file: Path, directory: Path) -> Path:
    """Write config.json, generation_config.json, model.safetensors and tokenizer.json; returns the directory."""
    reader = gguf.GGUFReader(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    directory.mkdir(parents=True, exist_ok=True)
    config = hf_config(metadata)
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        for part, num_heads in (
            (".attn_q.", config["num_attention_heads"]),
            (".attn_k.", config["num_key_value_heads"]),
        ):
            if part in tensor.name:
                values = halves_apart(values, num_heads)
        name = hf_name(tensor.name)
        tensors[name] = quantize(name, values, BF16)
    write_safetensors(directory / "model.safetensors", tensors)
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {"bos_token": tokens[ends["bos_token_id"]], "eos_token": tokens[ends["eos_token_id"]]}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        **named,
    }
    for file, value in (
        ("config.json", config),
        ("generation_config.json", ends),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (directory / file).write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
    byte_level_bpe(metadata).save(str(directory / "tokenizer.json"))
    return directory


def hf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    hidden_size, num_heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "bfloat16",
    }


def hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    return f"{_NAMES[parts[0]]}.{parts[1]}"


def halves_apart(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order, in which rows i and i + D/2 of a head are neighbours."""
    paired = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)


def byte_level_bpe(metadata: dict[str, Any]) -> Tokenizer:
    """SmolLM2's tokenizer: single digits, then GPT-2's splitting, then byte-level BPE."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        t
        for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
        if kind == gguf.TokenType.CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer
