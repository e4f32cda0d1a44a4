"""Writes golden.json: what llama.cpp and transformers make of the texts and conversations next to it.

Run it by hand (needs the ``perf`` extra): ``python -m tests.text.make_golden``. The tests read only the JSON.

Tables of one list of ids per text of nasty_texts.py:
  demo            the demo model's own vocabulary: llama.cpp, required to equal transformers
  pre             a small vocabulary, kept in the file too, with each pre-tokenizer: llama.cpp, null where it is known
                  not to follow the published pattern
  sentencepiece   a small vocabulary with scores and byte tokens, kept in the file too: llama.cpp; and the merges that
                  transformers makes of the scores
And chats: the texts that transformers makes of chat_cases.py.
"""

from __future__ import annotations

import json
import tempfile
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from tokenizers.trainers import BpeTrainer
from transformers.tokenization_utils_base import generate_merges
from transformers.utils.chat_template_utils import render_jinja_template

from numba_engine.checkpoint import open_checkpoint
from tests.text.chat_cases import CONVERSATIONS, TEMPLATES, TOKENS
from tests.text.nasty_texts import TEXTS
from tests.text.vocabularies import smollm2_tokenizer_json

PRE_TOKENIZERS = (
    *("default", "gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "deepseek-r1-qwen", "deepseek-coder"),
    *("tekken", "gpt-4o"),
)
GOLDEN = Path(__file__).with_name("golden.json")


def main() -> None:
    with open_checkpoint("demo") as checkpoint, tempfile.TemporaryDirectory() as scratch:
        metadata = {key: value for key, value in checkpoint.config.items() if key.startswith("tokenizer.")}
        demo = tokenize_with_llama_cpp(checkpoint.path)
        theirs = tokenize_with_transformers(metadata, Path(scratch))
        different = [text for text, a, b in zip(TEXTS, demo, theirs, strict=True) if a != b]
        assert not different, f"llama.cpp and transformers disagree on {different}"
        greedy = greedy_metadata()
        pre = {"metadata": greedy, "ids": {}}
        for name in PRE_TOKENIZERS:
            file = write_vocabulary(greedy | {"tokenizer.ggml.pre": name}, Path(scratch) / f"{name}.gguf")
            # The published Qwen2 tokenizer composes characters first (NFC); llama.cpp leaves that out.
            texts = [unicodedata.normalize("NFC", text) for text in TEXTS] if name == "qwen2" else TEXTS
            ids = tokenize_with_llama_cpp(file, texts)
            pre["ids"][name] = [None if is_approximated(name, t) else i for t, i in zip(TEXTS, ids, strict=True)]
        golden: dict[str, Any] = {"demo": demo, "pre": pre}
        sentencepiece = sentencepiece_metadata()
        golden["sentencepiece"] = {
            "metadata": sentencepiece,
            "merges": merges_of_transformers(sentencepiece),
            "ids": tokenize_with_llama_cpp(write_vocabulary(sentencepiece, Path(scratch) / "spm.gguf"), add_bos=True),
        }
    golden["chats"] = {name: render_with_transformers(template) for name, template in TEMPLATES.items()}
    lines = [f"{json.dumps(key)}: {json.dumps(golden[key], separators=(',', ':'))}" for key in golden]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def is_approximated(pre_tokenizer: str, text: str) -> bool:
    """Whether llama.cpp cuts a text otherwise than the published pattern, so that its ids are no reference."""
    if pre_tokenizer in ("tekken", "gpt-4o"):  # marks are letters in the pattern, not in llama.cpp
        return any(unicodedata.category(char).startswith("M") for char in text)
    if pre_tokenizer == "deepseek-coder":  # a range of the pattern holds wide spaces, llama.cpp cuts them off first
        return "\u2003" in text
    return False


def tokenize_with_llama_cpp(file: Path, texts: Sequence[str] = TEXTS, *, add_bos: bool = False) -> list[list[int]]:
    model = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=add_bos, special=True) for text in texts]


def tokenize_with_transformers(metadata: Mapping[str, Any], directory: Path) -> list[list[int]]:
    (directory / "tokenizer.json").write_text(json.dumps(smollm2_tokenizer_json(metadata)))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return [tokenizer.encode(text) for text in TEXTS]


def greedy_metadata() -> dict[str, Any]:
    """A byte-level vocabulary learned without cutting texts, so that only the pre-tokenizer keeps words apart."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    corpus = [text for text in TEXTS if "<" not in text]  # llama.cpp takes a learned "</s>" for a control token
    trainer = BpeTrainer(vocab_size=1300, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(corpus * 3, trainer)
    learned = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    # "iPhone" also as a token that no merges make: some pre-tokenizers find it all the same.
    tokens = [*sorted(learned, key=learned.__getitem__), "<|im_start|>", "<|im_end|>", "ĠiPhone"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(learned) + [3, 3, 1],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.add_bos_token": False,
    }


def sentencepiece_metadata() -> dict[str, Any]:
    """A vocabulary of the Llama 2 kind: specials, 256 bytes, then pieces whose scores fall by one each."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Metaspace()
    corpus = [text for text in TEXTS if "<" not in text and text.isprintable()] * 3
    corpus += [
        "the quick brown fox jumps over the lazy dog and then the other",
        "this is the thing that they think",
    ] * 9
    tokenizer.train_from_iterator(corpus, BpeTrainer(vocab_size=700, limit_alphabet=90, show_progress=False))
    learned = tokenizer.get_vocab()
    merged = sorted((piece for piece in learned if len(piece) > 1), key=learned.__getitem__)
    letters = sorted(piece for piece in learned if len(piece) == 1)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters, "<tool>"]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(letters)) + [4]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(merged) + len(letters))] + [0.0],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def merges_of_transformers(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    merges: list[tuple[str, str]] = generate_merges({token: i for i, token in enumerate(tokens)}, scores)
    return merges


def render_with_transformers(template: str) -> list[str]:
    texts: list[str]
    texts, _ = render_jinja_template(CONVERSATIONS, chat_template=template, add_generation_prompt=True, **TOKENS)
    return texts


def write_vocabulary(metadata: Mapping[str, Any], file: Path) -> Path:
    """A GGUF file without tensors."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(len(metadata["tokenizer.ggml.tokens"]))
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


if __name__ == "__main__":
    main()
