"""Vocabularies for tests, each in the two forms in which models publish them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numba_engine.checkpoint import Checkpoint


def gguf_checkpoint(metadata: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint("gguf", Path("test.gguf"), name="test", config=metadata, generation_config={}, tensors={})


def hf_checkpoint(directory: Path) -> Checkpoint:
    return Checkpoint("hf", directory, name="test", config={}, generation_config={}, tensors={})


def smollm2_tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer.json of SmolLM2 as its authors published it, with the lists of a GGUF file."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(i, tokens[i]) for i in _ids_of_type(metadata, 3)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


def llama2_tokenizer_json(metadata: Mapping[str, Any], merges: list[tuple[str, str]]) -> dict[str, Any]:
    """The tokenizer.json of Llama 2 as its authors published it, with other lists."""
    tokens = metadata["tokenizer.ggml.tokens"]
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(i, tokens[i]) for i in _ids_of_type(metadata, 2, 3)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def _ids_of_type(metadata: Mapping[str, Any], *types: int) -> list[int]:
    return [i for i, type_ in enumerate(metadata["tokenizer.ggml.token_type"]) if type_ in types]


def _added_token(token_id: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": content, **flags}
