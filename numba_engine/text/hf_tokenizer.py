"""Reads the tokenizer of a Hugging Face directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from numba_engine.errors import CheckpointError
from numba_engine.text.chat_template import ChatTemplate
from numba_engine.text.parts import TokenizerParts
from numba_engine.text.surrogates import lone_surrogate

_log = logging.getLogger(__name__)

_NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_JSON_BYTES = 256 << 20  # the largest published tokenizer.json is about 35 MB


def read_hf_tokenizer(directory: Path) -> TokenizerParts:
    """The tokenizer of ``directory``: tokenizer.json, completed from tokenizer_config.json as transformers 5 does.

    Whether BOS is put in front of texts is what tokenizer.json says; ``add_bos_token`` of the configuration, which
    transformers also ignores where there is a tokenizer.json, has no say. One departure: for ``tokenizer_class:
    LlamaTokenizer`` transformers 5 builds a tokenizer of its own from the file's vocabulary, which loses a space at the
    front of a text; here the file is followed, as llama.cpp, SentencePiece and transformers 4 do.

    Raises:
        CheckpointError: tokenizer.json is missing, or one of the files is malformed.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        what = (
            "missing; copy it from the model's repository, or write it with"
            " transformers.AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
        raise CheckpointError(what, file=str(file))
    backend = _parse_tokenizer(file)
    config_file = directory / "tokenizer_config.json"
    config = _read_json_object(config_file) if config_file.is_file() else {}
    if "added_tokens_decoder" not in config and (map_file := directory / "special_tokens_map.json").is_file():
        config |= _read_json_object(map_file)  # where configurations kept these tokens until 2023
    named = {
        key: token
        for key in _NAMED_SPECIAL_TOKENS
        if (token := _special(config.get(key), key, config_file)) is not None
    }
    _add_missing_tokens(backend, config, named, config_file)
    # transformers cuts and pads only when asked to; tokenizer.json may hold what it was trained with.
    backend.no_truncation()
    backend.no_padding()
    bos = named.get("bos_token")
    template = _chat_template(directory, config, config_file)
    return TokenizerParts(
        file=str(file),
        backend=backend,
        bos_token_id=None if bos is None else backend.token_to_id(bos.content),
        chat_template=None
        if template is None
        else ChatTemplate(template[0], {key: token.content for key, token in named.items()}, file=str(template[1])),
    )


def _parse_tokenizer(file: Path) -> tokenizers.Tokenizer:
    text = _read_text(file)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the Rust library is no Exception
        raise CheckpointError(
            f"not a tokenizer that the tokenizers library can read: {error}", file=str(file)
        ) from None


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, AddedToken], file: Path
) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = _get(config, "added_tokens_decoder", dict, file) or {}
    try:
        by_id = sorted(declared.items(), key=lambda item: int(item[0]))
    except ValueError:
        raise CheckpointError("added_tokens_decoder: keys must be token ids", file=str(file)) from None
    wanted = [_as_token(token, f"added_tokens_decoder[{key!r}]", file) for key, token in by_id]
    wanted += named.values()
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key) or []
        items = list(extra.values()) if isinstance(extra, dict) else extra
        if not isinstance(items, list):
            _log.warning("%s: %s must be a list of tokens, got %.80r; ignored", file, key, extra)
            continue
        wanted += [token for item in items if (token := _special(item, key, file)) is not None]
    for token in wanted:
        if token.content not in known:
            backend.add_tokens([token])
            known.add(token.content)


def _chat_template(directory: Path, config: Mapping[str, Any], config_file: Path) -> tuple[str, Path] | None:
    """The template's source and the file it is in; chat_template.jinja comes before the configuration."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return _read_text(file), file
    declared = config.get("chat_template")
    if declared is None:
        return None
    if isinstance(declared, str):
        return declared, config_file
    for named in declared if isinstance(declared, list) else [declared]:
        match named:
            case {"name": "default", "template": str(source)}:
                return source, config_file
            case {"name": str(), "template": str()}:  # for another purpose, such as tool use
                continue
        raise CheckpointError(
            "chat_template must be text, or a list of objects with name and template", file=str(config_file)
        )
    return None


def _as_token(value: object, where: str, file: Path) -> AddedToken:
    fields = {"content": value, "special": True} if isinstance(value, str) else value
    if isinstance(fields, dict) and isinstance(content := fields.get("content"), str):
        if what := lone_surrogate(content):
            raise CheckpointError(f"{where} {what}", file=str(file))
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        return AddedToken(content, **{flag: bool(fields[flag]) for flag in flags if flag in fields})
    raise CheckpointError(
        f"{where} must be a token's text, or an object with its content, got {value!r:.80}", file=str(file)
    )


def _special(value: object, where: str, file: Path) -> AddedToken | None:
    """A token that has a name; None where none is given, or what can be no token: texts and answers do without it."""
    if value is None:
        return None
    try:
        token = _as_token(value, where, file)
    except CheckpointError as error:
        _log.warning("%s; ignored", error)
        return None
    token.special = True
    return token


def _get(config: Mapping[str, Any], key: str, kind: type, file: Path) -> Any:
    value = config.get(key)
    if value is not None and not isinstance(value, kind):
        what = f"{key} must be a JSON {kind.__name__}, got {type(value).__name__}"
        raise CheckpointError(what, file=str(file))
    return value


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not JSON: {error}", file=str(file)) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"must hold a JSON object, got {type(value).__name__}", file=str(file))
    return value


def _read_text(file: Path) -> str:
    if (size := file.stat().st_size) > _MAX_JSON_BYTES:
        raise CheckpointError(f"{size} bytes; at most {_MAX_JSON_BYTES} are read", file=str(file))
    try:
        return file.read_text(encoding="utf-8-sig")  # some editors put a byte order mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot be read as UTF-8 text: {error}", file=str(file)) from None
