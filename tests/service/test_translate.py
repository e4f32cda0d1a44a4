"""Whatever a request holds, it is understood or refused as invalid."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_engine import (
    ConfigError,
    CountedTraffic,
    EngineStats,
    InvalidRequestError,
    Lever,
    MemoryNeed,
    MemoryUse,
    ModelInfo,
    OpCall,
    OpProfile,
    PositionLogprobs,
    ProfileSummary,
    SamplingParams,
    StepProfile,
    Timings,
    TokenLogprob,
    Usage,
)
from numba_engine.backends.instruments import KindBytes
from numba_engine.profiling.energy import EnergyLevel
from numba_engine.profiling.roofline import Target
from numba_engine_api.v1 import inference_pb2 as api
from service import translate, translate_profile
from service.telemetry import Counters
from tests.service.fake_llm import FakeLLM

uint32 = st.integers(0, 2**32 - 1) | st.integers(0, 3)
double = st.floats() | st.sampled_from([0.0, 1.0, -1.0, 0.5])

sampling = st.fixed_dictionaries(
    {},
    optional={
        "temperature": double,
        "top_k": uint32,
        "top_p": double,
        "min_p": double,
        "repetition_penalty": double,
        "presence_penalty": double,
        "frequency_penalty": double,
        "logit_bias": st.dictionaries(uint32, st.floats(width=32), max_size=3),
        "seed": st.integers(0, 2**64 - 1),
        "max_tokens": uint32,
        "stop": st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=18),
        "stop_token_ids": st.lists(uint32, max_size=3),
        "ignore_eos": st.booleans(),
        "logprobs": uint32,
        "time_limit_s": double,
    },
)


@settings(max_examples=300, deadline=None)
@given(sampling)
def test_sampling_is_taken_as_it_is_or_refused_by_field(fields: dict[str, Any]) -> None:
    request = api.GenerateRequest(prompt="a", sampling=api.SamplingParams(**fields))
    try:
        params = translate.prepared(FakeLLM(), request).params
    except InvalidRequestError as error:
        paths = [v.field for v in translate.in_fields_of(request, error).violations]
        assert paths
        assert set(paths) <= {f"sampling.{name}" for name in fields}
    else:
        defaults = SamplingParams(temperature=0.7)
        for name in SamplingParams.__dataclass_fields__:
            expected = fields.get(name, getattr(defaults, name))
            got = getattr(params, name)
            assert got == (tuple(expected) if isinstance(expected, list) else expected), name


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (SamplingParams, api.SamplingParams),
        (TokenLogprob, api.TokenLogprob),
        (PositionLogprobs, api.PositionLogprobs),
        (Usage, api.Usage),
        (Timings, api.Timings),
        (ModelInfo, api.GetModelInfoResponse),
        (EngineStats, api.EngineStats),
        (Counters, api.ServiceCounters),
        (OpProfile, api.OpProfile),
        (OpCall, api.OpCall),
        (CountedTraffic, api.CountedTraffic),
        (KindBytes, api.BytesByKind),
        (StepProfile, api.StepProfile),
        (MemoryUse, api.MemoryUse),
        (ProfileSummary, api.ProfileSummary),
        (Lever, api.Lever),
        (EnergyLevel, api.EnergyLevel),
        (MemoryNeed, api.MemoryNeed),
        (Target, api.ThroughputTarget),
    ],
)
def test_the_api_has_every_field_of_the_engine_s_values(value: type, message: type) -> None:
    names = {field.name for field in dataclasses.fields(value)}
    assert names - _SAID_OTHERWISE.get(value, set()) <= set(message.DESCRIPTOR.fields_by_name)


_SAID_OTHERWISE = {
    CountedTraffic: {"num_launches"},  # OpProfile has it
    StepProfile: {"time_source", "profiled", "timeline"},  # of the device; unprofiled; calls
    ProfileSummary: {"time_source", "peaks"},  # of the device
}


def profile_requests() -> st.SearchStrategy[api.ProfileRequest]:
    synthetic = st.builds(
        lambda fields: api.SyntheticWorkload(**fields),
        st.fixed_dictionaries({}, optional={"num_seqs": uint32, "prompt_len": uint32}),
    )
    live = st.builds(
        lambda fields: api.LiveTraffic(**fields), st.fixed_dictionaries({}, optional={"num_steps": uint32})
    )
    one_of = st.one_of(
        st.fixed_dictionaries({"synthetic": synthetic}),
        st.fixed_dictionaries({"live": live}),
        st.fixed_dictionaries({"prompt": st.text(max_size=5)}),
    )
    others = {
        "num_tokens": uint32,
        "fusion": st.booleans(),
        "detail": st.integers(0, 5),
        "warm_up_steps": uint32,
        "unprofiled_every": uint32,
    }
    return st.builds(lambda a, b: api.ProfileRequest(**a, **b), one_of, st.fixed_dictionaries({}, optional=others))


@given(profile_requests())
@settings(max_examples=200, deadline=None)
def test_a_profile_is_work_or_refused(request: api.ProfileRequest) -> None:
    llm = FakeLLM()
    try:
        work = translate_profile.prepared(llm, llm.stats, request)
    except InvalidRequestError as error:
        paths = {v.field for v in translate.in_fields_of(request, error).violations}
        assert paths
        for path in paths:
            message: Any = request
            for name in path.split("."):
                message = getattr(message, name)
    else:
        assert bool(work.requests) != bool(work.live_steps)
        assert len(work.requests) <= llm.stats.max_num_seqs
        assert [len(p.token_ids) for p in work.warm_up_requests] == [
            len(p.token_ids) for p in work.requests if work.warm_up_steps
        ]
        assert all(llm.validate(p.token_ids, p.params) == p for p in (*work.requests, *work.warm_up_requests))


def test_an_error_of_starting_a_server_is_a_bug_in_a_running_one() -> None:
    status = translate.to_grpc_status(ConfigError("max_num_seqs"), "r1")
    assert status.details == "internal error; the server's log has it under request id r1"


@pytest.mark.parametrize(("text", "limit", "short"), [("abc", 3, "abc"), ("abcd", 6, "abcd"), ("é" * 9, 10, "ééé…")])
def test_shortening_keeps_whole_characters(text: str, limit: int, short: str) -> None:
    assert translate._shortened(text, limit) == short
    assert len(short.encode()) <= limit
