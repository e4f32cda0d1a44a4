"""Request: a sequence on its way out: its text, its stops, its log-probabilities, its clock."""

from __future__ import annotations

import math
from dataclasses import replace

from numba_engine.execution.sampling import SampledTokens
from numba_engine.outputs import (
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    Timings,
    TokenLogprob,
    Usage,
)
from numba_engine.scheduling.sequence import Sequence
from numba_engine.text.detokenizer import Detokenizer
from numba_engine.text.stop import StopMatcher
from numba_engine.text.tokenizer import Tokenizer


class Request:
    """Turns each sampled token into what the client gets: text that is certain, and the reason to stop."""

    def __init__(
        self, sequence: Sequence, tokenizer: Tokenizer, *, eos_token_ids: frozenset[int], max_len: int
    ) -> None:
        params = sequence.params
        self.sequence = sequence
        self._detokenizer = Detokenizer(tokenizer, sequence.token_ids)
        self._stops = StopMatcher(params.stop)
        end_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._end_token_ids = end_ids.union(params.stop_token_ids)
        self._max_len = max_len
        self._deadline_s = None if params.time_limit_s is None else sequence.arrival_s + params.time_limit_s
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None

    def past_deadline(self, now_s: float) -> bool:
        return self._deadline_s is not None and now_s >= self._deadline_s

    def will_continue(self, num_unseen: int) -> bool:
        """Whether it will want another token after so many more, whatever they are, unless one of them ends it."""
        return self._count_reached(num_unseen) is None

    def push(self, token_id: int, logprobs: PositionLogprobs | None, now_s: float) -> RequestOutput:
        """Append a sampled token; the text it completes and, if it ends the request, why."""
        self.sequence.token_ids.append(token_id)
        self._first_token_s = self._first_token_s or now_s
        self._last_token_s = now_s
        if token_id in self._end_token_ids:
            return self._last_output(FinishReason.STOP_TOKEN, now_s, (token_id,), logprobs, stop_token_id=token_id)
        text, stop = self._stops.push(self._detokenizer.push(token_id))
        if stop is not None:
            return self._output(
                text,
                (token_id,),
                logprobs,
                FinishReason.STOP_SEQUENCE,
                stop_sequence=stop,
                timings=self._timings(now_s),
            )
        reason = self._limit_reached(now_s)
        if reason is not None:
            return self._last_output(reason, now_s, (token_id,), logprobs, text=text)
        return self._output(text, (token_id,), logprobs)

    def end(self, reason: FinishReason, now_s: float) -> RequestOutput:
        """End from outside (abort, time limit); what text was held back goes out."""
        return self._last_output(reason, now_s, (), None)

    def fail(self, error: str, now_s: float) -> RequestOutput:
        """End because no token could be chosen; what text was held back goes out."""
        output = self.end(FinishReason.ABORTED, now_s)
        return replace(output, finish_reason=None, stop_sequence=None, error=error)

    def _limit_reached(self, now_s: float) -> FinishReason | None:
        return self._count_reached() or (FinishReason.TIME_LIMIT if self.past_deadline(now_s) else None)

    def _count_reached(self, num_unseen: int = 0) -> FinishReason | None:
        """The limit that the tokens reach together with so many more."""
        max_tokens = self.sequence.params.max_tokens
        if max_tokens is not None and self.sequence.num_output_tokens + num_unseen >= max_tokens:
            return FinishReason.MAX_TOKENS
        return FinishReason.CONTEXT_FULL if len(self.sequence) + num_unseen >= self._max_len else None

    def _last_output(
        self,
        reason: FinishReason,
        now_s: float,
        token_ids: tuple[int, ...],
        logprobs: PositionLogprobs | None,
        *,
        text: str = "",
        stop_token_id: int | None = None,
    ) -> RequestOutput:
        """The held-back text is certain now: flush it, unless it completes a stop string after all."""
        flushed, stop = self._stops.push(self._detokenizer.flush())
        text += flushed
        if stop is None:
            text += self._stops.flush()
        else:
            reason, stop_token_id = FinishReason.STOP_SEQUENCE, None
        return self._output(
            text,
            token_ids,
            logprobs,
            reason,
            stop_sequence=stop,
            stop_token_id=stop_token_id,
            timings=self._timings(now_s),
        )

    def _output(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: PositionLogprobs | None,
        finish_reason: FinishReason | None = None,
        *,
        stop_sequence: str | None = None,
        stop_token_id: int | None = None,
        timings: Timings | None = None,
    ) -> RequestOutput:
        sequence = self.sequence
        return RequestOutput(
            request_id=sequence.request_id,
            text=text,
            token_ids=token_ids,
            logprobs=() if logprobs is None else (logprobs,),
            usage=Usage(
                prompt_tokens=sequence.num_prompt_tokens,
                cached_prompt_tokens=sequence.num_cached_prompt_tokens,
                completion_tokens=sequence.num_output_tokens,
            ),
            finish_reason=finish_reason,
            stop_sequence=stop_sequence,
            stop_token_id=stop_token_id,
            timings=timings,
        )

    def _timings(self, now_s: float) -> Timings:
        sequence = self.sequence
        scheduled_s = now_s if sequence.first_scheduled_s is None else sequence.first_scheduled_s
        first_s = now_s if self._first_token_s is None else self._first_token_s
        decode_s = 0.0 if self._last_token_s is None else self._last_token_s - first_s
        return Timings(
            queue_s=scheduled_s - sequence.arrival_s,
            ttft_s=first_s - sequence.arrival_s,
            prefill_s=first_s - scheduled_s,
            decode_s=decode_s,
            mean_inter_token_s=decode_s / max(1, sequence.num_output_tokens - 1),
            num_preemptions=sequence.num_preemptions,
        )


def logprobs_of_row(
    sampled: SampledTokens, row: int, num_top: int | None, tokenizer: Tokenizer
) -> PositionLogprobs | None:
    """Of the token drawn in a row and of the likeliest ``num_top``, fewer where fewer are possible at all; None where
    none were asked for."""
    if num_top is None:
        return None
    assert sampled.logprobs is not None
    assert sampled.top_token_ids is not None
    assert sampled.top_logprobs is not None

    def named(token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token_id, logprob, tokenizer.token_text(token_id))

    top = zip(sampled.top_token_ids[row, :num_top].tolist(), sampled.top_logprobs[row, :num_top].tolist(), strict=True)
    return PositionLogprobs(
        chosen=named(int(sampled.token_ids[row]), float(sampled.logprobs[row])),
        top=tuple(named(token_id, logprob) for token_id, logprob in top if math.isfinite(logprob)),
    )
