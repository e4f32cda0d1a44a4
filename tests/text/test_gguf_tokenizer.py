from __future__ import annotations

from typing import Any

import pytest

from numba_engine.errors import CheckpointError, UnsupportedModelError
from numba_engine.text.gguf_tokenizer import TokenType
from numba_engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.nasty_texts import TEXTS
from tests.text.vocabularies import gguf_checkpoint

PRE_TOKENIZERS = (
    *("default", "gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "deepseek-r1-qwen", "deepseek-coder"),
    *("tekken", "gpt-4o"),
)


def load(metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(gguf_checkpoint(metadata))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_each_pre_tokenizer_cuts_as_llama_cpp_does(name: str, golden: dict[str, Any]) -> None:
    tokenizer = load(golden["pre"]["metadata"] | {"tokenizer.ggml.pre": name})
    ids = golden["pre"]["ids"][name]
    expected = {text: ids for text, ids in zip(TEXTS, ids, strict=True) if ids is not None}
    assert len(expected) > 40
    assert {text: tokenizer.encode(text) for text in expected} == expected


def test_every_pre_tokenizer_is_told_apart(golden: dict[str, Any]) -> None:
    ids = golden["pre"]["ids"]
    assert not {(a, b) for a in PRE_TOKENIZERS for b in PRE_TOKENIZERS if a < b and ids[a] == ids[b]}


def test_sentencepiece_gives_the_ids_of_llama_cpp(sentencepiece: Tokenizer, golden: dict[str, Any]) -> None:
    expected = dict(zip(TEXTS, golden["sentencepiece"]["ids"], strict=True))
    assert {t: sentencepiece.encode(t) for t in TEXTS} == expected
    assert all(ids[0] == sentencepiece.bos_token_id == 1 for ids in expected.values())


@pytest.mark.parametrize("text", ["", " ", "  the ", "<tool> the", "\n", "日本 🎉"])
def test_without_a_space_prefix_nothing_is_put_in_front(golden: dict[str, Any], text: str) -> None:
    tokenizer = load(golden["sentencepiece"]["metadata"] | {"tokenizer.ggml.add_space_prefix": False})
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


TINY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab", "<tool>", "<pad>"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 4, 5],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
TINY_SPM: dict[str, Any] = TINY | {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.scores": [0.0, 0.0, -2.0, -3.0, -1.0, 0.0, 0.0],
}


def test_token_types() -> None:
    tokenizer = load(TINY)
    assert tokenizer.encode("<s>aba</s>b<tool>") == [0, 4, 2, 1, 3, 5]
    assert [i for i in range(7) if tokenizer.is_special(i)] == [0, 1]
    # Control tokens are skipped, user-defined ones are text, unused ones stand for nothing.
    assert tokenizer.decode([0, 4, 5, 6, 1], skip_special_tokens=True) == "ab<tool>"
    assert tokenizer.decode([0, 4, 5, 6, 1]) == "<s>ab<tool></s>"


def test_bos_and_eos_are_special_whatever_their_type() -> None:
    tokenizer = load(TINY | {"tokenizer.ggml.token_type": [1] * 7})
    assert tokenizer.encode("<s>ab</s>") == [0, 4, 1]
    assert tokenizer.decode([0, 4, 5, 1], skip_special_tokens=True) == "ab<tool>"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [4]),
        ({"tokenizer.ggml.add_bos_token": True}, [0, 4]),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [0, 4, 1]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [0, 4]),  # adds BOS unless told otherwise
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, [4]),
    ],
)
def test_bos_and_eos(changes: dict[str, Any], expected: list[int]) -> None:
    tokenizer = load(TINY | changes)
    assert tokenizer.encode("ab") == expected
    assert tokenizer.encode("ab", add_special_tokens=False) == [4]


def test_bytes_without_a_token_are_dropped_before_merging_as_transformers_does() -> None:
    assert load(TINY).encode("aXb") == [4]


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (TINY, {"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens must be a list, got nothing"),
        (TINY, {"tokenizer.ggml.tokens": []}, r"tokenizer\.ggml\.tokens is empty"),
        (TINY, {"tokenizer.ggml.tokens": "abcdefg"}, r"tokenizer\.ggml\.tokens must be a list, got 'abcdefg'"),
        (TINY, {"tokenizer.ggml.tokens": ["a", 7]}, r"tokenizer\.ggml\.tokens\[1\] must be of type str, got 7"),
        (TINY, {"tokenizer.ggml.tokens": [*"abcdea", "f"]}, r"tokens\[0\] and \[5\] are the same token 'a'"),
        (TINY, {"tokenizer.ggml.tokens": [*"abcdef", ""]}, r"tokens\[6\] is empty"),
        (TINY, {"tokenizer.ggml.token_type": [1] * 6}, r"token_type has 6 entries, tokenizer\.ggml\.tokens has 7"),
        (TINY, {"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges must be a list, got nothing"),
        (TINY, {"tokenizer.ggml.merges": ["a b", "ab"]}, r"merges\[1\] must be two tokens .* got 'ab'"),
        (TINY, {"tokenizer.ggml.merges": ["a b c"]}, r"merges\[0\] must be two tokens"),
        (TINY, {"tokenizer.ggml.merges": ["a "]}, r"merges\[0\] must be two tokens"),
        (TINY, {"tokenizer.ggml.merges": ["a x"]}, r"tokenizer\.ggml\.merges: .*x"),
        (TINY, {"tokenizer.ggml.merges": ["b a"]}, r"tokenizer\.ggml\.merges: .*ba"),
        (TINY, {"tokenizer.ggml.add_bos_token": 1}, r"add_bos_token must be a boolean, got 1"),
        (
            TINY,
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
            r"tokenizer\.ggml\.bos_token_id is missing",
        ),
        (TINY, {"tokenizer.ggml.model": None}, r"tokenizer\.ggml\.model must be a string, got nothing"),
        (TINY, {"tokenizer.ggml.pre": 3}, r"tokenizer\.ggml\.pre must be a string, got 3"),
        (TINY_SPM, {"tokenizer.ggml.scores": None}, r"tokenizer\.ggml\.scores must be a list, got nothing"),
        (TINY_SPM, {"tokenizer.ggml.scores": [0.0]}, r"scores has 1 entries, tokenizer\.ggml\.tokens has 7"),
        (TINY_SPM, {"tokenizer.ggml.scores": [float("nan")] * 7}, r"tokenizer\.ggml\.scores\[0\] is not a number"),
        (TINY_SPM, {"tokenizer.ggml.add_space_prefix": "yes"}, r"add_space_prefix must be a boolean, got 'yes'"),
    ],
)
def test_malformed_metadata_is_refused(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    metadata = {key: value for key, value in (base | changes).items() if value is not None}
    with pytest.raises(CheckpointError, match=message) as caught:
        load(metadata)
    assert caught.value.file == "test.gguf"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.bos_token_id": 7}, "bos_token_id must be a token id in 0…6, got 7; ignored"),
        ({"tokenizer.ggml.eos_token_id": -1}, "eos_token_id must be a token id in 0…6, got -1; ignored"),
        ({"tokenizer.ggml.padding_token_id": "1"}, "padding_token_id must be a token id in 0…6, got '1'; ignored"),
    ],
)
def test_unused_ids_of_no_token_are_no_reason_to_refuse(
    changes: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(TINY | {"tokenizer.ggml.add_bos_token": False} | changes).encode("ab")
    assert any(message in logged for logged in caplog.messages)


@pytest.mark.parametrize("kind", [TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.CONTROL])
def test_what_ends_an_answer_is_structure_whatever_its_type(kind: int) -> None:
    tokens = [*TINY["tokenizer.ggml.tokens"], "<|im_end|>"]
    types = [*TINY["tokenizer.ggml.token_type"], int(kind)]
    tokenizer = load(TINY | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    end = len(tokens) - 1
    assert tokenizer.encode("ab<|im_end|>")[-1] == end
    assert tokenizer.is_special(end)
    assert tokenizer.decode([end], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [("tokenizer.ggml.model", "bert", "gpt2, llama"), ("tokenizer.ggml.pre", "klingon", "llama-bpe")],
)
def test_unknown_kinds_are_named(key: str, value: str, allowed: str) -> None:
    with pytest.raises(UnsupportedModelError, match=allowed) as caught:
        load(TINY | {key: value})
    assert (caught.value.field, caught.value.value) == (key, value)


@pytest.mark.parametrize("text", ["café", "đem", "õ", "ĠĊ"])
def test_the_text_of_a_user_defined_token_is_its_content(text: str) -> None:
    """Not GPT-2's names of bytes, in which é is one byte of some character."""
    tokens = [*TINY["tokenizer.ggml.tokens"], text]
    types = [*TINY["tokenizer.ggml.token_type"], TokenType.USER_DEFINED.value]
    tokenizer = load(TINY | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    ids = tokenizer.encode(f"ab{text}ab")
    assert len(tokens) - 1 in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"ab{text}ab"
    assert tokenizer.token_text(len(tokens) - 1) == text
