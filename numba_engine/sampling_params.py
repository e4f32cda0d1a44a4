"""How one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from numba_engine.errors import FieldViolation, InvalidRequestError
from numba_engine.plain_values import as_tuple, plain_number

MAX_LOGPROBS = 20
MAX_INT32 = 2**31 - 1
MAX_STOP_SEQUENCES = 16
MAX_STOP_SEQUENCE_BYTES = 1024
MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping parameters of one request; validates itself.

    Logits pass through, in this order: penalties (repetition, presence, frequency), logit bias, temperature, top-k,
    top-p, min-p, softmax, categorical draw.

    Numbers may be NumPy's, ``stop`` one string, sequences and mappings of any kind: they are kept as Python's own, so
    parameters can be pickled, hashed and written as JSON.

    Raises:
        InvalidRequestError: with one violation per parameter that is of another type or out of range.
    """

    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it. 0…100."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to at least this. (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one. [0, 1]."""
    repetition_penalty: float = 1.0
    """Divide positive (multiply negative) logits of tokens seen in prompt or output by this (Keskar 2019). (0, 10]."""
    presence_penalty: float = 0.0
    """Subtract from the logit of each token already in the output. [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtract, times its count, from the logit of each token already in the output. [-2, 2]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these token ids. Each in [-100, 100]."""
    seed: int | None = None
    """uint64. The same seed, prompt and parameters give the same tokens whatever else runs. None draws a fresh one."""
    max_tokens: int | None = None
    """Stop after this many tokens; None goes on until another stop, at the latest when the context is full."""
    stop: tuple[str, ...] = ()
    """Stop as soon as the text contains one of these; the match is not part of the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop after one of these, besides the model's own end tokens; not part of the text."""
    ignore_eos: bool = False
    """Go on past the model's end tokens."""
    logprobs: int | None = None
    """None: no log-probabilities. n: of the chosen token and of the n most likely ones. 0…20."""
    time_limit_s: float | None = None
    """End with finish reason TIME_LIMIT after this many seconds since arrival, keeping what was generated."""

    @property
    def has_penalties(self) -> bool:
        """A penalty that is not neutral: the tokens so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def __post_init__(self) -> None:
        self._keep_plain_values()
        bad: list[FieldViolation] = []

        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                bad.append(FieldViolation(name, f"must be {allowed}, got {getattr(self, name)!r}"))

        require(_between(self.temperature, 0.0, 100.0), "temperature", "a number from 0 (greedy) to 100")
        require(_is_int(self.top_k, 0, MAX_INT32), "top_k", f"0 (keeps all) to {MAX_INT32}")
        require(_between(self.top_p, 0.0, 1.0) and self.top_p > 0, "top_p", "a number in (0, 1]")
        require(_between(self.min_p, 0.0, 1.0), "min_p", "a number in [0, 1]")
        penalty = self.repetition_penalty
        require(_between(penalty, 0.0, 10.0) and penalty > 0, "repetition_penalty", "a number in (0, 10]")
        require(_between(self.presence_penalty, -2.0, 2.0), "presence_penalty", "a number in [-2, 2]")
        require(_between(self.frequency_penalty, -2.0, 2.0), "frequency_penalty", "a number in [-2, 2]")
        require(
            isinstance(self.logit_bias, dict)
            and len(self.logit_bias) <= MAX_LOGIT_BIAS
            and all(_is_int(k, 0, MAX_INT32) and _between(v, -100.0, 100.0) for k, v in self.logit_bias.items()),
            "logit_bias",
            f"at most {MAX_LOGIT_BIAS} token ids, each with a number in [-100, 100]",
        )
        require(self.seed is None or _is_int(self.seed, 0, 2**64 - 1), "seed", "an unsigned 64-bit integer")
        require(self.max_tokens is None or _is_int(self.max_tokens, 1, MAX_INT32), "max_tokens", f"1 to {MAX_INT32}")
        require(
            isinstance(self.stop, tuple)
            and len(self.stop) <= MAX_STOP_SEQUENCES
            and all(isinstance(s, str) and 0 < _utf8_bytes(s) <= MAX_STOP_SEQUENCE_BYTES for s in self.stop),
            "stop",
            f"at most {MAX_STOP_SEQUENCES} strings of 1 to {MAX_STOP_SEQUENCE_BYTES} bytes of UTF-8",
        )
        ids = self.stop_token_ids
        require(
            isinstance(ids, tuple) and all(_is_int(i, 0, MAX_INT32) for i in ids),
            "stop_token_ids",
            "a list of token ids",
        )
        require(isinstance(self.ignore_eos, bool), "ignore_eos", "true or false")
        require(self.logprobs is None or _is_int(self.logprobs, 0, MAX_LOGPROBS), "logprobs", f"0 to {MAX_LOGPROBS}")
        limit = self.time_limit_s
        require(limit is None or (_between(limit, 0.0, 1e6) and limit > 0), "time_limit_s", "a number of seconds > 0")
        if bad:
            raise InvalidRequestError(*bad)

    def _keep_plain_values(self) -> None:
        """What is of the right kind becomes Python's own; all else stays as it is, and is refused."""
        for own in fields(self):
            value = getattr(self, own.name)
            match own.name:
                case "stop":
                    value = (value,) if isinstance(value, str) else as_tuple(value)
                case "stop_token_ids":
                    value = as_tuple(value)
                case "logit_bias" if isinstance(value, Mapping):
                    value = {plain_number(key): plain_number(bias) for key, bias in value.items()}
                case _:
                    value = plain_number(value)
            object.__setattr__(self, own.name, value)


def _utf8_bytes(text: str) -> int:
    """0 where it is no Unicode text."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


def _between(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


assert not _between(math.nan, 0, 1), "comparisons with NaN are false, so NaN never passes a range check"
