from __future__ import annotations

import functools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_engine.text.detokenizer import Detokenizer
from numba_engine.text.tokenizer import Tokenizer
from tests.text.nasty_texts import TEXTS


def deltas(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.fixture(params=["demo", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    value: Tokenizer = request.getfixturevalue(request.param)
    return value


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_deltas_of_a_text_are_its_decoding(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode(text)
    pieces = deltas(tokenizer, ids, skip=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces).count("�") == text.count("�")  # no character was split


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_deltas_of_any_ids_are_their_decoding(
    demo: Tokenizer, sentencepiece: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    for tokenizer in (demo, sentencepiece):
        some_bytes = [i for i in range(600) if any(b >= 0x80 for b in tokenizer.token_bytes(i))]
        token = st.one_of(st.integers(0, tokenizer.vocab_size - 1), st.sampled_from(some_bytes), st.integers(0, 2))
        ids = data.draw(st.lists(token, max_size=30))
        assert "".join(deltas(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_text_after_a_prompt_is_what_it_adds_to_the_prompts(
    demo: Tokenizer, sentencepiece: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    """At every split of any ids: the text of both is that of the prompt, less what it left unfinished, and the rest."""
    for tokenizer in (demo, sentencepiece):
        ids = data.draw(st.lists(any_token(tokenizer), max_size=12))
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        for split in range(len(ids) + 1):
            prompt = Detokenizer(tokenizer, skip_special_tokens=skip)
            before = "".join(prompt.push(i) for i in ids[:split])
            answer = Detokenizer(tokenizer, ids[:split], skip_special_tokens=skip)
            assert before + "".join(answer.push(i) for i in ids[split:]) + answer.flush() == whole


@functools.cache
def any_token(tokenizer: Tokenizer) -> st.SearchStrategy[int]:
    """Any id, and more often one that begins with a space or is a part of a character."""
    spaces = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)[:1] == b" "][:20]
    some_bytes = [i for i in range(600) if any(b >= 0x80 for b in tokenizer.token_bytes(i))]
    return st.one_of(st.integers(0, tokenizer.vocab_size - 1), st.sampled_from(spaces + some_bytes))


def test_a_space_between_prompt_and_answer_is_kept(sentencepiece: Tokenizer) -> None:
    prompt, answer = sentencepiece.encode("one"), sentencepiece.encode("two", add_special_tokens=False)
    assert sentencepiece.decode(prompt + answer, skip_special_tokens=True) == "one two"
    detokenizer = Detokenizer(sentencepiece, prompt)
    assert "".join(map(detokenizer.push, answer)) == " two"


@given(raw=st.binary(max_size=40))
@settings(max_examples=500, deadline=None)
def test_any_bytes_are_decoded_as_utf8_says(sentencepiece: Tokenizer, raw: bytes) -> None:
    ids = [3 + byte for byte in raw]  # <0x00> is token 3
    pieces = deltas(sentencepiece, ids)
    whole = raw.decode(errors="replace")
    assert "".join(pieces) == whole.removeprefix(" ")
    # What is held is at most the start of one character, or of a surrogate (U+FFFD twice).
    for end in range(len(raw)):
        held = len(raw[: end + 1].decode(errors="replace").removeprefix(" ")) - len("".join(pieces[: end + 1]))
        assert 0 <= held <= 2


def test_a_character_comes_out_with_its_last_byte(sentencepiece: Tokenizer) -> None:
    ids = [3 + byte for byte in "é€🎉".encode()]
    assert deltas(sentencepiece, ids) == ["", "é", "", "", "€", "", "", "", "🎉", ""]


def test_bytes_that_cannot_become_a_character_do_not_wait(sentencepiece: Tokenizer) -> None:
    ids = [3 + byte for byte in b"\xff\xe2\x82A\xf0\x9f\x8e"]
    assert deltas(sentencepiece, ids) == ["�", "", "", "�A", "", "", "", "�"]


def test_a_skipped_token_does_not_break_a_character(sentencepiece: Tokenizer) -> None:
    first, last = (3 + byte for byte in "é".encode())
    assert deltas(sentencepiece, [first, 2, last]) == ["", "", "é", ""]
    assert deltas(sentencepiece, [first, 2, last], skip=False) == ["", "�</s>", "�", ""]


def test_only_the_first_space_is_taken_away(sentencepiece: Tokenizer) -> None:
    the = sentencepiece.encode("the", add_special_tokens=False)
    assert len(the) == 1
    assert deltas(sentencepiece, [1, *the, *the]) == ["", "the", " the", ""]
    assert deltas(sentencepiece, [1, *the], skip=False) == ["<s>", " the", ""]
    space = 3 + ord(" ")
    assert deltas(sentencepiece, [space, space, *the]) == ["", " ", " the", ""]


def test_ids_without_text_add_nothing(demo: Tokenizer) -> None:
    (hello,) = demo.encode("Hello")
    assert deltas(demo, [49152, hello, 10**6]) == ["", "Hello", "", ""]


def test_zwj_families_stream_whole_characters(demo: Tokenizer) -> None:
    text = "👩‍👩‍👧‍👦 ok"
    pieces = deltas(demo, demo.encode(text))
    assert "".join(pieces) == text
    assert not re.search("\ufffd|[\ud800-\udfff]", "".join(pieces))
    assert pieces[-1] == ""
