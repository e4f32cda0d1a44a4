"""Text files of a checkpoint that some editor began with a byte order mark read as without it."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from numba_engine import LLM, EngineConfig, InvalidRequestError, SamplingParams
from tests.tiny_models import CHAT_TEMPLATE, TinyModel, write_hf

pytestmark = pytest.mark.kernels

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
CHAT = [{"role": "user", "content": "the fox"}]


def test_every_text_file(tmp_path: Path) -> None:
    answers = []
    for name, mark in (("without", b""), ("with", codecs.BOM_UTF8)):
        directory = write_hf(tmp_path / name, TinyModel(num_layers=1), num_shards=2)
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        files = [file for file in directory.iterdir() if file.suffix in (".json", ".jinja")]
        assert len(files) == 7
        for file in files:
            file.write_bytes(mark + file.read_bytes())
        llm = LLM(str(directory), EngineConfig(num_threads=1))
        answers.append((llm.apply_chat_template(CHAT), llm.generate(["the fox"], GREEDY)[0].token_ids))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("key", ["bos_token", "pad_token", "additional_special_tokens", "chat_template"])
def test_text_that_is_no_unicode_is_no_bug(tmp_path: Path, key: str) -> None:
    """JSON can write lone surrogates."""
    directory = write_hf(tmp_path / "m", TinyModel(num_layers=1))
    file = directory / "tokenizer_config.json"
    value = ["\ud800"] if key == "additional_special_tokens" else "\ud800"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    llm = LLM(str(directory), EngineConfig(num_threads=1))
    assert llm.generate(["the fox"], GREEDY)[0].token_ids
    if key == "chat_template":
        with pytest.raises(InvalidRequestError, match="chat template"):
            llm.apply_chat_template(CHAT)
