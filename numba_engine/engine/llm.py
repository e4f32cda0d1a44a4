"""LLM: text and token ids to completions, over an engine."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from numba_engine.backends.base import Backend
from numba_engine.backends.delegating import UnfusedBackend
from numba_engine.checkpoint import Progress
from numba_engine.config import EngineConfig
from numba_engine.engine.engine import Engine
from numba_engine.engine.loading import load_model
from numba_engine.engine.validation import ValidRequest, members_of, not_in_vocabulary, validated
from numba_engine.errors import FieldViolation, InvalidRequestError, NonFiniteLogitsError
from numba_engine.outputs import Completion, EngineStats, RequestOutput
from numba_engine.plain_values import plain_number
from numba_engine.sampling_params import SamplingParams
from numba_engine.scheduling.scheduler import ScheduledStep

Prompt = str | Sequence[int]
"""Text, or token ids."""


class LLM:
    """A loaded model and its engine.

    One thread owns it: ``add_request``, ``abort``, ``step`` and what is built on them; a second one inside them at the
    same time gets a RuntimeError. The text methods, ``validate``, ``model_info`` and ``default_sampling`` are safe from
    any thread. ``stream`` and ``generate`` may be used side by side: each gets the outputs of its own requests.

    Args:
        model: a Hugging Face directory, a ``.gguf`` file, or ``"demo"``.
        config: how to run it; the defaults suit one machine.
        progress: called while weights load.

    Raises:
        CheckpointError, UnsupportedModelError, BackendUnavailableError, OutOfMemoryError: saying what to do.
    """

    def __init__(self, model: str, config: EngineConfig | None = None, *, progress: Progress | None = None) -> None:
        config = config or EngineConfig()
        self.model = load_model(model, config, progress)
        self.engine = Engine(self.model, config)
        self.model_info = self.model.info
        self.default_sampling = self.model.default_sampling
        """For what a request leaves open: as the model's makers recommend, else the usual mild truncation."""
        self._tokenizer = self.model.tokenizer
        self._inboxes: dict[str, list[RequestOutput]] = {}
        """Where the outputs of requests of ``stream`` and ``generate`` go."""
        self._unclaimed: list[RequestOutput] = []
        """Outputs of all other requests, until the next ``step`` hands them out."""

    # ---- text: safe from any thread --------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as transformers gives them: special tokens in it are recognised."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the tokens. Rows of the vocabulary that the tokenizer has no token for stand for no text.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
        """
        token_ids = tuple(map(plain_number, members_of("token_ids", token_ids)))
        if wrong := not_in_vocabulary("token_ids", token_ids, self.model_info):
            raise InvalidRequestError(wrong)
        known = [token_id for token_id in token_ids if token_id < self._tokenizer.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation (``role`` and ``content`` each) up to where the assistant answers."""
        return self._tokenizer.apply_chat_template(messages)

    def validate(self, prompt: Prompt, params: SamplingParams) -> ValidRequest:
        """The prompt's token ids and the parameters, checked: ``add_request`` takes them without another look.

        Raises:
            InvalidRequestError: naming each field that is wrong.
        """
        if isinstance(prompt, str):
            self._require_may_fit(prompt)
            prompt = self.tokenize(prompt)
        token_ids = members_of("prompt", prompt, meant="text or a list of token ids")
        return validated(token_ids, params, self.model_info)

    # ---- requests --------------------------------------------------------------------------------------------------

    def add_request(self, request_id: str, prompt: Prompt | ValidRequest, params: SamplingParams | None = None) -> None:
        """Queue a request; its outputs come from ``step`` under its id. A ``ValidRequest`` has its parameters in it.

        Raises:
            InvalidRequestError: naming each field that is wrong, or that the id is in use.
            QueueFullError: if ``max_num_seqs`` requests run and ``max_waiting`` wait already.
        """
        if not isinstance(request_id, str):
            raise InvalidRequestError(FieldViolation("request_id", f"must be text, got {type(request_id).__name__}"))
        if not isinstance(prompt, ValidRequest):
            prompt, params = self.validate(prompt, params or self.default_sampling), None
        assert params is None, "a ValidRequest has its own"
        self.engine.add_request(request_id, prompt)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a queued or running request and free its blocks now; its last output, or None if there is no such one.

        ``step`` hands nothing of it out any more, so its id is free for another request. One that has just ended by
        itself ends as it did.
        """
        last = self.engine.abort(request_id)
        outputs = [output for output in self._unclaimed if output.request_id == request_id]
        self._unclaimed = [output for output in self._unclaimed if output.request_id != request_id]
        outputs += [last] if last is not None else []
        return RequestOutput.merged(outputs) if outputs else None

    def step(self) -> list[RequestOutput]:
        """One forward pass: every scheduled sequence moves on. Outputs of the requests that got or ended something."""
        self._route(self.engine.step())
        outputs, self._unclaimed = self._unclaimed, []
        return outputs

    def synchronize(self) -> None:
        """Be done with what was launched ahead, so that nothing is in flight; its outputs come from ``step``."""
        self._route(self.engine.synchronize())

    @property
    def has_unfinished(self) -> bool:
        """``step`` has something to do or to hand out."""
        return self.engine.has_unfinished or bool(self._unclaimed)

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of one step, prompts' and others' together."""
        return self.engine.config.max_num_batched_tokens

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def warm_up(self) -> None:
        """Compile every kernel a request can need, which takes a while once per machine, so that none has to wait.

        Leaves no trace in ``stats``.
        """
        longest = self.model_info.max_model_len - 1
        prompts = [[0] * min(length, longest) for length in (20, 3)]
        greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        sampled = SamplingParams(top_k=5, top_p=0.9, min_p=0.1, logprobs=1, max_tokens=2, ignore_eos=True)
        with suppress(NonFiniteLogitsError):  # real requests may fare better, and say it themselves if not
            self.generate(prompts, [greedy, sampled])
        self.engine.capture_graphs()
        self.synchronize()
        self.engine.observer = _WithoutFusion(self.engine.backend)  # those ops have kernels of their own
        try:
            with suppress(NonFiniteLogitsError):
                self.generate(prompts, [greedy, sampled])
        finally:
            self.engine.observer = None
        self.engine.reset_counters()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Run the prompts (or the one) to their ends, batched together; completions in the prompts' order.

        Raises:
            InvalidRequestError: before any is run.
            NonFiniteLogitsError: after all are, if the model could not choose a token in one of them.
        """
        each_prompt = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            each_params: Sequence[SamplingParams] = [params or self.default_sampling] * len(each_prompt)
        else:
            each_params = members_of("params", params, meant="SamplingParams or a list of them, one per prompt")
        if len(each_params) != len(each_prompt):
            raise InvalidRequestError(
                FieldViolation("params", f"{len(each_params)} given for {len(each_prompt)} prompts")
            )
        requests = [self.validate(prompt, own) for prompt, own in zip(each_prompt, each_params, strict=True)]
        ids = [f"generate-{next(_ids)}" for _ in each_prompt]
        to_add = deque(zip(ids, requests, strict=True))
        outputs: dict[str, list[RequestOutput]] = {request_id: [] for request_id in ids}
        self._inboxes |= outputs
        try:
            while to_add or any(self.engine.has(request_id) for request_id in ids):
                while to_add and self.engine.has_place:
                    self.add_request(*to_add.popleft())
                self._route(self.engine.step())
        finally:
            for request_id in ids:
                self.abort(request_id)
                del self._inboxes[request_id]
        return [_completion(own, outputs[request_id]) for own, request_id in zip(requests, ids, strict=True)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Run one prompt, yielding each step's output. Closing the iterator aborts the request.

        Raises:
            InvalidRequestError, QueueFullError: before the first output.
            NonFiniteLogitsError: the model can choose no further token.
        """
        request_id = f"stream-{next(_ids)}"
        self.add_request(request_id, prompt, params)
        inbox = self._inboxes[request_id] = []
        try:
            while inbox or self.engine.has(request_id):
                if inbox:
                    output = inbox.pop(0)
                    output.raise_error()
                    yield output
                else:
                    self._route(self.engine.step())
        finally:
            self.abort(request_id)
            del self._inboxes[request_id]

    def _require_may_fit(self, text: str) -> None:
        """Raises InvalidRequestError for a text that is too long whatever its tokens are: they would take seconds."""
        per_token, max_tokens = self._tokenizer.max_token_chars, self.model_info.max_model_len
        if per_token is not None and len(text) > per_token * max_tokens:
            what = f"is {len(text)} characters, and the context of {max_tokens} tokens holds {per_token * max_tokens}"
            raise InvalidRequestError(FieldViolation("prompt", f"{what} at most"))

    def _route(self, outputs: Iterable[RequestOutput]) -> None:
        """To whoever asked for them: the one place where outputs find their way."""
        for output in outputs:
            self._inboxes.get(output.request_id, self._unclaimed).append(output)


class _WithoutFusion:
    """Has every step run its phases as unfused ops, as a profile may."""

    def __init__(self, backend: Backend) -> None:
        self._ops = UnfusedBackend(backend)

    def ops_for_step(self, step: ScheduledStep) -> Backend:
        return self._ops

    def step_done(self, step: ScheduledStep, time_s: float) -> None: ...


_ids = itertools.count()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A lone text, or a lone list of numbers, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    entries = members_of("prompts", prompts, meant="a prompt or a list of prompts, each text or a list of token ids")
    return [entries] if entries and all(isinstance(plain_number(entry), int | float) for entry in entries) else entries


def _completion(request: ValidRequest, outputs: list[RequestOutput]) -> Completion:
    last = outputs[-1]
    last.raise_error()
    assert last.finish_reason is not None
    assert last.timings is not None
    return Completion(
        prompt_token_ids=request.token_ids,
        token_ids=tuple(i for output in outputs for i in output.token_ids),
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason,
        stop_sequence=last.stop_sequence,
        stop_token_id=last.stop_token_id,
        logprobs=tuple(p for output in outputs for p in output.logprobs),
        usage=last.usage,
        timings=last.timings,
    )
