"""Rebuilds a tokenizer from the metadata of a GGUF file.

GGUF keeps a tokenizer as lists (tokens, their types, merges or scores) and names its pre-tokenizer
(``tokenizer.ggml.pre``) instead of describing it; ``_PRE_TOKENIZERS`` says what the names mean. Format: the GGUF
specification in ggml's docs/gguf.md; defaults where a key is missing: llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from numba_engine.checkpoint.end_tokens import END_TOKEN_TEXTS
from numba_engine.errors import CheckpointError, UnsupportedModelError
from numba_engine.text.chat_template import ChatTemplate
from numba_engine.text.parts import TokenizerParts

_log = logging.getLogger(__name__)

_SPACE = "▁"  # how SentencePiece writes a space


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_gguf_tokenizer(file: Path, metadata: Mapping[str, Any]) -> TokenizerParts:
    """The tokenizer described by ``tokenizer.*`` keys.

    Raises:
        CheckpointError: a key is missing or malformed.
        UnsupportedModelError: ``tokenizer.ggml.model`` or ``tokenizer.ggml.pre`` is one that this engine does not have.
    """
    keys = _Keys(str(file), metadata)
    vocabulary = _read_vocabulary(keys)
    model = keys.string("tokenizer.ggml.model")
    if model == "gpt2":
        backend, adds_bos = _byte_level_bpe(keys, vocabulary)
    elif model == "llama":
        backend, adds_bos = _sentencepiece_bpe(keys, vocabulary), True
    else:
        raise UnsupportedModelError("tokenizer.ggml.model", model, "gpt2, llama", file=keys.file)
    _add_special_tokens(backend, keys, vocabulary)

    named = {
        key: vocabulary.tokens[i] for key in ("bos", "eos", "unknown", "padding") if (i := keys.token(key)) is not None
    }
    bos_id, eos_id = keys.token("bos"), keys.token("eos")
    adds_bos = keys.boolean("tokenizer.ggml.add_bos_token", default=adds_bos)
    adds_eos = keys.boolean("tokenizer.ggml.add_eos_token", default=False)
    for adds, token_id, name in ((adds_bos, bos_id, "bos"), (adds_eos, eos_id, "eos")):
        if adds and token_id is None:
            keys.fail(
                f"tokenizer.ggml.{name}_token_id is missing, and the tokenizer is to add that token to every text"
            )
    backend.post_processor = _surround_with(
        backend,
        bos=vocabulary.tokens[bos_id] if adds_bos and bos_id is not None else None,
        eos=vocabulary.tokens[eos_id] if adds_eos and eos_id is not None else None,
    )

    source = keys.string("tokenizer.chat_template", default="")
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return TokenizerParts(
        file=keys.file,
        backend=backend,
        bos_token_id=bos_id,
        chat_template=ChatTemplate(source, {names[k]: t for k, t in named.items()}, file=keys.file) if source else None,
        silent_ids=frozenset(vocabulary.of_type(TokenType.UNUSED)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Vocabulary:
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    def of_type(self, *types: TokenType) -> list[int]:
        return [token_id for token_id, type_ in enumerate(self.types) if type_ in types]


def _read_vocabulary(keys: _Keys) -> _Vocabulary:
    tokens = keys.list("tokenizer.ggml.tokens", str)
    if not tokens:
        keys.fail("tokenizer.ggml.tokens is empty")
    types = keys.list("tokenizer.ggml.token_type", int, length=len(tokens), default=[TokenType.NORMAL] * len(tokens))
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        first = next(i for i, token in enumerate(tokens) if ids[token] != i)
        keys.fail(f"tokenizer.ggml.tokens[{first}] and [{ids[tokens[first]]}] are the same token {tokens[first]!r}")
    if "" in ids:
        keys.fail(f"tokenizer.ggml.tokens[{ids['']}] is empty")
    return _Vocabulary(tokens, types, ids)


def _add_special_tokens(backend: tokenizers.Tokenizer, keys: _Keys, vocabulary: _Vocabulary) -> None:
    """Make control and user-defined tokens recognisable in text; only control tokens are skipped in plain text."""
    # BOS, EOS and what ends an answer are structure also in files that type every token as normal.
    structure = {i for i in (keys.token("bos"), keys.token("eos")) if i is not None}
    structure.update(vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN))
    structure.update(vocabulary.ids[text] for text in END_TOKEN_TEXTS if text in vocabulary.ids)
    backend.add_tokens(
        [
            AddedToken(vocabulary.tokens[i], special=i in structure, normalized=False)
            for i in sorted(structure.union(vocabulary.of_type(TokenType.USER_DEFINED)))
        ]
    )


def _surround_with(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> TemplateProcessing:
    """A post-processor that puts these tokens of ``backend`` around every text."""
    # Named B and E here: the library's template language gives some characters of real tokens a meaning.
    tokens = {"B": bos, "E": eos}
    single = [name for name, token in (("B", bos), ("$A", "the text"), ("E", eos)) if token is not None]
    return TemplateProcessing(
        single=single,
        pair=[*single, "$B"],  # asked for by the library, not used
        special_tokens=[
            {"id": name, "ids": [backend.token_to_id(token)], "tokens": [token]}
            for name, token in tokens.items()
            if token is not None
        ],
    )


# Byte-level BPE: "gpt2"


def _byte_level_bpe(keys: _Keys, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, and whether it adds BOS where the file does not say."""
    name = keys.string("tokenizer.ggml.pre", default="default")
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        raise UnsupportedModelError("tokenizer.ggml.pre", name, ", ".join(sorted(_PRE_TOKENIZERS)), file=keys.file)
    pairs = [merge.split(" ") for merge in keys.list("tokenizer.ggml.merges", str)]
    bad = next((i for i, pair in enumerate(pairs) if len(pair) != 2 or not all(pair)), None)
    if bad is not None:
        keys.fail(
            f"tokenizer.ggml.merges[{bad}] must be two tokens with one space between, got {' '.join(pairs[bad])!r}"
        )
    backend = tokenizers.Tokenizer(
        _bpe(keys, vocabulary, [(left, right) for left, right in pairs], ignore_merges=pre.ignore_merges)
    )
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(pre.build())
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """What a value of ``tokenizer.ggml.pre`` stands for in the model's tokenizer.json."""

    build: Callable[[], list[pre_tokenizers.PreTokenizer]]
    ignore_merges: bool = False  # a word that is a token needs no merges to be found
    adds_bos: bool = False
    nfc: bool = False


def _splits(*patterns: str) -> Callable[[], list[pre_tokenizers.PreTokenizer]]:
    """Cut by each pattern in turn, then name bytes as GPT-2 does."""
    return lambda: [
        *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _gpt2_words() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _digits_and_gpt2_words() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2_words()]


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """OpenAI's cl100k pattern as Llama 3 and Qwen use it: they differ in how many digits go together."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, contraction: str) -> str:
    """OpenAI's o200k pattern: a word begins anew where lower case turns to upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{contraction}|{lead}{_UPPER}+{_LOWER}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = _PreTokenizer(_splits(_words(r"\p{N}{1,3}")), ignore_merges=True, adds_bos=True)
_SINGLE_DIGITS = _PreTokenizer(_digits_and_gpt2_words)
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS = {
    "default": _PreTokenizer(_splits(r"[\p{P}$+<=>^~|]+", _GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer(_gpt2_words),
    "phi-2": _PreTokenizer(_gpt2_words),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _PreTokenizer(_splits(_words(r"\p{N}{1,3}"))),
    "qwen2": _PreTokenizer(_splits(_words(r"\p{N}")), nfc=True),
    "deepseek-r1-qwen": _PreTokenizer(_splits(_words(r"\p{N}"))),
    "deepseek-coder": _PreTokenizer(_splits("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "tekken": _PreTokenizer(_splits(_cased_words(r"\p{N}", "")), ignore_merges=True, adds_bos=True),
    "gpt-4o": _PreTokenizer(_splits(_cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?"))),
    "llama4": _PreTokenizer(_splits(_cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?"))),
}


# SentencePiece BPE with byte fallback: "llama"


def _sentencepiece_bpe(keys: _Keys, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    scores = keys.list("tokenizer.ggml.scores", float, length=len(vocabulary.tokens))
    not_a_number = next((i for i, score in enumerate(scores) if math.isnan(score)), None)
    if not_a_number is not None:  # NaN has no order
        keys.fail(f"tokenizer.ggml.scores[{not_a_number}] is not a number")
    unknown = next(iter(vocabulary.of_type(TokenType.UNKNOWN)), None)
    if (named := keys.token("unknown")) is not None:
        unknown = named
    backend = tokenizers.Tokenizer(
        _bpe(
            keys,
            vocabulary,
            _merges_from_scores(vocabulary, scores),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
        )
    )
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if keys.boolean("tokenizer.ggml.add_space_prefix", default=True):
        # Before each stretch of plain text, so also after a special token: as the models were trained.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that build each piece from two others, best score first.

    SentencePiece merges the pair whose union scores best; a list of merges in that order does the same. Order within
    one score as in transformers' converter, so that both give the same ids.
    """
    pieces = {vocabulary.tokens[i]: scores[i] for i in vocabulary.of_type(TokenType.NORMAL, TokenType.USER_DEFINED)}
    ids = vocabulary.ids
    merges: list[tuple[float, str, str]] = []
    for piece, score in pieces.items():
        splits = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        found = [(left, right) for left, right in splits if left in pieces and right in pieces]
        found.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(score, left, right) for left, right in found]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _bpe(keys: _Keys, vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(vocab=vocabulary.ids, merges=merges, **options)
    except Exception as error:  # the library raises plain Exception
        keys.fail(f"tokenizer.ggml.merges: {error}")


class _Keys:
    """Metadata with every access checked."""

    def __init__(self, file: str, metadata: Mapping[str, Any]) -> None:
        self.file = file
        self._metadata = metadata

    def fail(self, message: str) -> NoReturn:
        raise CheckpointError(message, file=self.file)

    def string(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get(key, default)
        if not isinstance(value, str):
            self.fail(f"{key} must be a string, got {_shown(value)}")
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self._metadata.get(key, default)
        if not isinstance(value, bool):
            self.fail(f"{key} must be a boolean, got {_shown(value)}")
        return value

    def token(self, name: str) -> int | None:
        """The id in ``tokenizer.ggml.<name>_token_id``; None where it is not given."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._metadata.get(key)
        num_tokens = len(self._metadata["tokenizer.ggml.tokens"])
        if value is not None and (not isinstance(value, int) or not 0 <= value < num_tokens):
            _log.warning(
                "%s: %s must be a token id in 0…%d, got %s; ignored", self.file, key, num_tokens - 1, _shown(value)
            )
            return None
        return value

    def list(self, key: str, kind: type, *, length: int | None = None, default: list[Any] | None = None) -> list[Any]:
        value = self._metadata.get(key, default)
        if hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            self.fail(f"{key} must be a list, got {_shown(value)}")
        value = list(value)
        wrong = next((i for i, item in enumerate(value) if not isinstance(item, kind)), None)
        if wrong is not None:
            self.fail(f"{key}[{wrong}] must be of type {kind.__name__}, got {_shown(value[wrong])}")
        if length is not None and len(value) != length:
            self.fail(f"{key} has {len(value)} entries, tokenizer.ggml.tokens has {length}")
        return value


def _shown(value: object) -> str:
    return "nothing (the key is missing)" if value is None else f"{value!r:.80}"
