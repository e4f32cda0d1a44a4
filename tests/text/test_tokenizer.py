from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from numba_engine.errors import InvalidRequestError, UnsupportedModelError
from numba_engine.text.parts import TokenizerParts
from numba_engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.nasty_texts import TEXTS
from tests.text.vocabularies import gguf_checkpoint, smollm2_tokenizer_json

START, END = 1, 2  # <|im_start|>, <|im_end|>


@pytest.fixture(scope="session")
def demo_library(demo_metadata: dict[str, Any]) -> Library:
    return Library.from_str(json.dumps(smollm2_tokenizer_json(demo_metadata)))


def test_demo_gives_the_ids_of_llama_cpp_and_transformers(demo: Tokenizer, golden: dict[str, Any]) -> None:
    assert {t: demo.encode(t) for t in TEXTS} == dict(zip(TEXTS, golden["demo"], strict=True))


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_encoded_is_decoded_again(demo: Tokenizer, text: str) -> None:
    # The demo's vocabulary has no token for some bytes that never or rarely occur in text.
    known = {byte for i in range(17, 300) for byte in demo.token_bytes(i)}
    expected = bytes(byte for byte in text.encode() if byte in known)
    assert demo.decode(demo.encode(text)) == expected.decode(errors="replace")


@pytest.mark.parametrize("text", [text for text in TEXTS if "<s>" not in text and "▁" not in text])
def test_sentencepiece_text_comes_back(sentencepiece: Tokenizer, text: str) -> None:
    assert sentencepiece.decode(sentencepiece.encode(text), skip_special_tokens=True) == text


def test_no_token_stands_for_more_characters_than_it_says(demo: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (demo, sentencepiece):
        assert tokenizer.max_token_chars is not None
        longest = max(len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size))
        assert longest <= tokenizer.max_token_chars <= 2 * longest + 8


def test_only_special_tokens_are_special(demo: Tokenizer) -> None:
    assert [i for i in range(demo.vocab_size) if demo.is_special(i)] == list(range(17))
    assert not demo.is_special(demo.vocab_size)
    assert (demo.vocab_size, demo.bos_token_id) == (49152, START)


def test_special_tokens_are_kept_or_skipped(demo: Tokenizer) -> None:
    ids = demo.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (START, END)
    assert demo.decode(ids) == "<|im_start|>user\nhi<|im_end|>"
    assert demo.decode(ids, skip_special_tokens=True) == "user\nhi"


def test_spaces_before_punctuation_are_not_cleaned_up(demo: Tokenizer) -> None:
    text = "a , b . c ! d 's"
    assert demo.decode(demo.encode(text)) == text


def test_one_token_by_itself(demo: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert [demo.token_text(i) for i in demo.encode(" 👩")] == [" �", "�", "�"]
    assert demo.token_text(START) == "<|im_start|>"
    assert demo.token_text(demo.encode(" the")[0]) == " the"
    assert demo.token_text(demo.vocab_size + 5) == ""
    assert sentencepiece.token_text(sentencepiece.encode("the")[1]) == " the"
    assert sentencepiece.token_text(3 + 0xE2) == "�"
    assert sentencepiece.token_text(3 + ord("\n")) == "\n"


@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_decoding_is_the_librarys(demo: Tokenizer, demo_library: Library, ids: list[int], skip: bool) -> None:
    assert demo.decode(ids, skip_special_tokens=skip) == demo_library.decode(ids, skip_special_tokens=skip)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_decoding_invalid_bytes_is_the_librarys(demo: Tokenizer, demo_library: Library, data: st.DataObject) -> None:
    single = [i for i in range(17, 300) if len(demo.token_bytes(i)) == 1]
    ids = data.draw(st.lists(st.sampled_from(single), max_size=30))
    assert demo.decode(ids) == demo_library.decode(ids)


@pytest.mark.parametrize("bad", [-1, 49152, 2**40])
def test_ids_outside_the_vocabulary_are_refused(demo: Tokenizer, bad: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"token id {bad} at position 1 is not in 0…49151") as caught:
        demo.decode([5, bad])
    assert caught.value.violations[0].field == "token_ids"


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "\ud83d\ude00"])
def test_lone_surrogates_are_refused(demo: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate U\\+D") as caught:
        demo.encode(text)
    assert caught.value.violations[0].field == "prompt"


def test_a_chat_is_encoded_as_its_template_writes_it(demo: Tokenizer) -> None:
    ids = demo.apply_chat_template([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert demo.decode(ids) == text
    assert ids == demo.encode(text)


def test_a_chat_needs_a_template(demo_metadata: dict[str, Any]) -> None:
    without = {key: value for key, value in demo_metadata.items() if key != "tokenizer.chat_template"}
    tokenizer = load_tokenizer(gguf_checkpoint(without))
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_many_threads_read_at_once(demo_metadata: dict[str, Any], golden: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(gguf_checkpoint(demo_metadata))
    wrong: list[str] = []

    def work() -> None:
        for text, ids in zip(TEXTS, golden["demo"], strict=True):
            if tokenizer.encode(text) != ids or len(tokenizer.decode(ids)) > len(text):
                wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


DECODERS = [
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}, {"type": "Fuse"}]},
    {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
]


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder["type"])
def test_decoders_that_look_at_neighbours_are_refused(decoder: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="decoder"):
        Tokenizer(TokenizerParts("tokenizer.json", _word_level(decoder), None, None))


def test_without_a_decoder_words_are_joined_by_spaces() -> None:
    library = _word_level(None)
    tokenizer = Tokenizer(TokenizerParts("tokenizer.json", library, None, None))
    assert tokenizer.vocab_size == 8  # ids have gaps
    for ids in ([], [0], [2, 0, 7], [7, 7]):
        assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.decode([2, 0, 5, 7]) == "two zero seven"


def _word_level(decoder: dict[str, Any] | None) -> Library:
    model = {"type": "WordLevel", "vocab": {"zero": 0, "two": 2, "seven": 7}, "unk_token": "zero"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return Library.from_str(
        json.dumps({"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model} | parts)
    )
