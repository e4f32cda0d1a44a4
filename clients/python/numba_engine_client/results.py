"""What a generation comes to, gathered from its stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from numba_engine_api.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation."""

    request_id: str
    prompt_token_count: int
    prompt_token_ids: tuple[int, ...]
    """Empty unless asked for with ``include_prompt_token_ids``."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[pb.PositionLogprobs, ...]
    """One per token; empty unless asked for with ``logprobs``."""
    finish_reason: str
    """``stop_token``, ``stop_sequence``, ``max_tokens``, ``context_full``, ``time_limit`` or ``aborted``."""
    stop_sequence: str | None
    stop_token_id: int | None
    usage: pb.Usage
    timings: pb.Timings


@dataclass(slots=True)
class Gathering:
    """A generation under way: what its messages have said so far."""

    started: pb.GenerationStarted | None = None
    finished: pb.GenerationFinished | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.PositionLogprobs] = field(default_factory=list)

    def add(self, response: pb.GenerateResponse) -> pb.GenerationDelta | None:
        """Take in a message; the delta where it is one."""
        match response.WhichOneof("event"):
            case "started":
                self.started = response.started
            case "finished":
                self.finished = response.finished
            case "delta":
                self.texts.append(response.delta.text)
                self.token_ids.extend(response.delta.token_ids)
                self.logprobs.extend(response.delta.logprobs)
                return response.delta
        return None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def request_id(self) -> str:
        return self.started.request_id if self.started else ""

    def result(self) -> Generation:
        """Raises RuntimeError before the end of the stream."""
        if self.finished is None:
            raise RuntimeError("the generation has not finished: read its stream to the end first")
        started = self.started or pb.GenerationStarted()
        finished = self.finished
        return Generation(
            request_id=started.request_id,
            prompt_token_count=started.prompt_token_count,
            prompt_token_ids=tuple(started.prompt_token_ids),
            text=self.text,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=finish_reason(finished.finish_reason),
            stop_sequence=finished.stop_sequence if finished.HasField("stop_sequence") else None,
            stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
            usage=finished.usage,
            timings=finished.timings,
        )


def finish_reason(value: int) -> str:
    """``max_tokens`` for FINISH_REASON_MAX_TOKENS; ``unspecified`` for one that this client does not know."""
    known = value in pb.FinishReason.values()
    return pb.FinishReason.Name(value).removeprefix("FINISH_REASON_").lower() if known else "unspecified"
