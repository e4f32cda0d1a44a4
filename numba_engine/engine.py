"""LLM: the engine's front door. Start reading here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from numba_engine.config import EngineConfig
from numba_engine.outputs import Completion, EngineStats, ModelInfo, RequestOutput
from numba_engine.profiling.report import ProfileSummary, StepProfile
from numba_engine.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Progress = Callable[[str, int, int], None]
"""Called while loading with (what, bytes done, bytes in all)."""


class LLM:
    """A loaded model and its engine. Not thread-safe: one thread owns it. INTERFACE DRAFT, being implemented."""

    def __init__(self, model: str, config: EngineConfig | None = None, *, progress: Progress | None = None) -> None: ...

    # facts (safe from any thread, fixed after loading)
    model_info: ModelInfo
    default_sampling: SamplingParams  # from generation_config.json, for requests that leave things unset

    # text (safe from any thread)
    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...
    def validate(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Token ids of the prompt, after every check that add_request would do. Raises InvalidRequestError."""

    # requests
    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Queue a request. Raises InvalidRequestError, QueueFullError."""

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a queued or running request and free its blocks now; its last output (ABORTED), None if unknown."""

    def step(self) -> list[RequestOutput]:
        """One forward pass: every scheduled sequence moves on. Outputs of the sequences that got or ended something."""

    @property
    def has_unfinished(self) -> bool: ...
    @property
    def stats(self) -> EngineStats: ...

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Run the prompts to their ends, batched, in order."""

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Run one prompt, yielding each step's output. Closing the iterator aborts the request."""

    # profile: attach, then every step() is measured until detached
    def start_profile(self) -> None: ...
    def take_step_profile(self) -> StepProfile | None:
        """What the last step() did, None if it did nothing or no profile is on."""

    def stop_profile(self) -> ProfileSummary: ...
