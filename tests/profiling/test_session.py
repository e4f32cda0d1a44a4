"""ProfileSession above an engine: it leaves nothing in it, and a profile of its own run ends as it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from numba_engine import LLM, EngineConfig, FinishReason, InvalidRequestError, SamplingParams
from numba_engine.profiling import ProfiledStep, ProfileEnd, ProfileRun, ProfileSession, ProfileStarted, ProfileWork

pytestmark = pytest.mark.kernels

PROMPT = list(range(40, 60))
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def session(tiny_gguf: Path) -> ProfileSession:
    return ProfileSession(LLM(str(tiny_gguf), EngineConfig(backend="cpu", num_threads=2, num_kv_blocks=64)))


def test_steps_come_one_by_one_with_a_profile_only_while_one_is_on(session: ProfileSession) -> None:
    request = session.llm.validate(PROMPT, GREEDY)
    expected = session.llm.generate(PROMPT, GREEDY)[0].token_ids
    with session.running([request]) as steps:
        before = [next(steps) for _ in range(2)]
        session.start()
        during = [next(steps) for _ in range(2)]
        session.stop()
        after = list(steps)
    assert [step.profile is None for step in (*before, *during, *after)] == [True] * 2 + [False] * 2 + [True] * 2
    tokens = [i for step in (*before, *during, *after) for output in step.outputs for i in output.token_ids]
    assert tuple(tokens) == expected
    assert [step.profile.index for step in during if step.profile] == [0, 1]


def test_leaving_early_or_being_refused_leaves_no_request_behind(session: ProfileSession) -> None:
    llm = session.llm
    requests = [llm.validate(PROMPT[i:], GREEDY) for i in range(3)]
    with session.running(requests) as steps:
        next(steps)
        assert llm.stats.num_running == 3
    assert not llm.has_unfinished
    llm.add_request("taken 1", PROMPT, GREEDY)
    with pytest.raises(InvalidRequestError, match="in use"):
        ProfileRun(session, "taken", ProfileWork(requests)).start()
    assert (llm.stats.num_waiting, llm.engine.observer) == (1, None)
    llm.abort("taken 1")


def test_a_run_of_its_own(session: ProfileSession) -> None:
    requests = [session.llm.validate(PROMPT[i:], GREEDY) for i in range(2)]
    work = ProfileWork(requests, warm_up_steps=2, warm_up_requests=requests[::-1])
    started, *steps, end = ProfileRun(session, "run", work).events()
    assert isinstance(started, ProfileStarted)
    assert started.peaks is session.peaks
    assert [step.profile.index for step in steps if isinstance(step, ProfiledStep)] == list(range(6))
    assert isinstance(end, ProfileEnd)
    assert (end.finish_reason, end.usage.completion_tokens) == (FinishReason.MAX_TOKENS, 12)
    assert (end.summary.num_decode_steps, end.summary.decode_seqs) == (5, 2)
    assert session.llm.engine.observer is None


def test_a_run_that_is_left_stops_measuring(session: ProfileSession) -> None:
    events = ProfileRun(session, "run", ProfileWork([session.llm.validate(PROMPT, GREEDY)])).events()
    for _ in range(3):
        next(events)
    assert session.llm.engine.observer is session
    events.close()
    assert (session.llm.engine.observer, session.llm.has_unfinished) == (None, False)
