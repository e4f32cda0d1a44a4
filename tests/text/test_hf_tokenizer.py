from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from numba_engine.errors import CheckpointError
from numba_engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.nasty_texts import TEXTS
from tests.text.vocabularies import hf_checkpoint, llama2_tokenizer_json, smollm2_tokenizer_json

Write = Callable[..., Path]
OF_ANY_CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a model directory's tokenizer files."""

    def write(tokenizer: dict[str, Any], config: dict[str, Any] | None = None, **files: str) -> Path:
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        for name, text in files.items():
            (tmp_path / f"{name}.jinja").write_text(text)
        return tmp_path

    return write


def load(directory: Path) -> Tokenizer:
    return load_tokenizer(hf_checkpoint(directory))


def tiny(**parts: Any) -> dict[str, Any]:
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<s>": 3, "</s>": 4}, "merges": [["a", "b"]]}
    return {"version": "1.0", "added_tokens": [], "model": model} | dict.fromkeys(names) | parts


def test_the_demo_as_its_authors_published_it(
    write: Write, demo_metadata: dict[str, Any], golden: dict[str, Any], demo: Tokenizer
) -> None:
    config = {"bos_token": "<|im_start|>", "chat_template": demo_metadata["tokenizer.chat_template"]}
    tokenizer = load(write(smollm2_tokenizer_json(demo_metadata), config))
    assert {t: tokenizer.encode(t) for t in TEXTS} == dict(zip(TEXTS, golden["demo"], strict=True))
    assert (tokenizer.bos_token_id, tokenizer.vocab_size) == (demo.bos_token_id, demo.vocab_size)
    chat = [{"role": "user", "content": "¿Qué tal?"}]
    assert tokenizer.apply_chat_template(chat) == demo.apply_chat_template(chat)


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": "<s>", "add_bos_token": False},
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
        {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False}},
        {},
    ],
)
def test_tokenizer_json_says_what_is_added(write: Write, config: dict[str, Any]) -> None:
    adds_bos = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}},
    }
    for post_processor, expected in ((adds_bos, [3, 2]), (None, [2])):
        directory = write(tiny(post_processor=post_processor), OF_ANY_CLASS | config)
        tokenizer = load(directory)
        assert tokenizer.encode("ab") == expected
        assert tokenizer.encode("ab", add_special_tokens=False) == [2]
        assert tokenizer.bos_token_id == (3 if "bos_token" in config else None)
        transformers = pytest.importorskip("transformers")
        assert transformers.AutoTokenizer.from_pretrained(directory).encode("ab") == expected


def test_special_tokens_map_of_older_models(write: Write) -> None:
    directory = write(tiny(), {"chat_template": "{{ bos_token }}|{{ eos_token }}"})
    (directory / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
    tokenizer = load(directory)
    assert tokenizer.bos_token_id == 3
    assert tokenizer.encode("</s>ab<s>") == [4, 2, 3]
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render(CHAT) == "<s>|</s>"


def test_tokens_that_only_the_configuration_names_are_added(write: Write) -> None:
    config = {
        "added_tokens_decoder": {
            "6": {"content": "<tool>", "special": False},
            "5": {"content": "<|turn|>", "special": True},
        },
        "eos_token": "<|end|>",
        "additional_special_tokens": ["<|extra|>"],
    }
    tokenizer = load(write(tiny(), config))
    assert tokenizer.encode("ab<|turn|>b<tool><|end|><|extra|>") == [2, 5, 1, 6, 7, 8]
    assert [tokenizer.is_special(i) for i in range(9)] == [False] * 5 + [True, False, True, True]
    assert tokenizer.vocab_size == 9


def test_texts_are_neither_cut_nor_padded(write: Write) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 6}, "direction": "Right", "pad_id": 4, "pad_type_id": 0, "pad_token": "</s>"} | {
        "pad_to_multiple_of": None
    }
    tokenizer = load(write(tiny(truncation=truncation, padding=padding)))
    assert tokenizer.encode("bbb") == [1, 1, 1]
    assert tokenizer.encode("b") == [1]


CHAT = [{"role": "user", "content": "hi"}]
NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages[0].content }}!"}]


@pytest.mark.parametrize(
    ("declared", "file", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", None, "<s>hi"),
        (NAMED, None, "hi!"),
        ("from the configuration", "from the file", "from the file"),
        (None, "{{ eos_token }}", "</s>"),
    ],
)
def test_where_the_chat_template_is(write: Write, declared: object, file: str | None, expected: str) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": declared}
    tokenizer = load(write(tiny(), config, **({} if file is None else {"chat_template": file})))
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render(CHAT) == expected


@pytest.mark.parametrize("config", [None, {}, {"chat_template": None}, {"chat_template": NAMED[:1]}])
def test_no_chat_template(write: Write, config: dict[str, Any] | None) -> None:
    assert load(write(tiny(), config)).chat_template is None


def test_tokenizer_json_is_required(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing; copy it from .*save_pretrained"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {}}', '{"version": "1.0", "model": {"type": "Nope"}}'])
def test_malformed_tokenizer_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must hold a JSON object, got list"),
        ("[" * 100_000, "not JSON"),
        ('{"added_tokens_decoder": []}', "added_tokens_decoder must be a JSON dict"),
        ('{"added_tokens_decoder": {"x": "<s>"}}', "added_tokens_decoder: keys must be token ids"),
        ('{"added_tokens_decoder": {"5": 1}}', r"added_tokens_decoder\['5'\] must be a token's text"),
        ('{"chat_template": 5}', "chat_template must be text, or a list"),
        ('{"chat_template": [{"template": "x"}]}', "chat_template must be text, or a list"),
    ],
)
def test_malformed_configuration_is_refused(write: Write, text: str, message: str) -> None:
    directory = write(tiny())
    (directory / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(directory)
    assert caught.value.file == str(directory / "tokenizer_config.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"bos_token": 3}', "bos_token must be a token's text"),
        ('{"bos_token": {"text": "<s>"}}', "bos_token must be a token's text"),
        (r'{"pad_token": "a\ud800"}', "pad_token is not Unicode text: lone surrogate U+D800 at character 1"),
        ('{"additional_special_tokens": 5}', "additional_special_tokens must be a list"),
        ('{"additional_special_tokens": [5, "<new>"]}', "additional_special_tokens must be a token's text"),
    ],
)
def test_named_tokens_that_can_be_none_are_ignored_with_a_warning(
    write: Write, caplog: pytest.LogCaptureFixture, text: str, message: str
) -> None:
    directory = write(tiny())
    before = load(directory).encode("hello")
    (directory / "tokenizer_config.json").write_text(text)
    tokenizer = load(directory)
    assert tokenizer.encode("hello") == before
    assert "<new>" not in text or len(tokenizer.encode("<new>", add_special_tokens=False)) == 1
    assert message in caplog.text
    assert str(directory / "tokenizer_config.json") in caplog.text


def test_files_that_are_not_text_are_refused(write: Write) -> None:
    directory = write(tiny(), {})
    (directory / "tokenizer_config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="cannot be read as UTF-8 text"):
        load(directory)


def test_demo_directory_equals_auto_tokenizer(write: Write, demo_metadata: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    directory = write(smollm2_tokenizer_json(demo_metadata), OF_ANY_CLASS)
    peer, tokenizer = transformers.AutoTokenizer.from_pretrained(directory), load(directory)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == peer.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == peer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == peer.decode(ids)
        assert tokenizer.decode(ids, skip_special_tokens=True) == peer.decode(ids, skip_special_tokens=True)


def test_llama2_as_its_authors_published_it(write: Write, golden: dict[str, Any], sentencepiece: Tokenizer) -> None:
    metadata, merges = golden["sentencepiece"]["metadata"], golden["sentencepiece"]["merges"]
    config = OF_ANY_CLASS | {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    directory = write(llama2_tokenizer_json(metadata, merges), config)
    tokenizer = load(directory)
    for text, ids in zip(TEXTS, golden["sentencepiece"]["ids"], strict=True):
        assert tokenizer.encode(text) == ids
        for skip in (False, True):
            decoded = tokenizer.decode(ids, skip_special_tokens=skip)
            assert decoded == sentencepiece.decode(ids, skip_special_tokens=skip)
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == peer.encode(text)
        assert tokenizer.decode(ids) == peer.decode(ids)
        assert tokenizer.decode(ids, skip_special_tokens=True) == peer.decode(ids, skip_special_tokens=True)
