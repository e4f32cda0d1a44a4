"""Tokenize, Detokenize, GetModelInfo, GetStatus."""

from __future__ import annotations

import asyncio
import threading

from numba_engine import SamplingParams
from numba_engine_api.v1 import inference_pb2 as api
from tests.service.conftest import PATIENCE_S, Serve
from tests.service.fake_llm import END_TOKEN, FakeLLM
from tests.service.test_errors import generate


async def test_tokenize_text_and_chat(serve: Serve) -> None:
    async with serve() as served:
        assert list((await served.stub.Tokenize(api.TokenizeRequest(text="né"))).token_ids) == [110, 195, 169]
        assert list((await served.stub.Tokenize(api.TokenizeRequest(text=""))).token_ids) == []
        chat = api.Chat(messages=[api.ChatMessage(role="u", content="x")])
        assert bytes((await served.stub.Tokenize(api.TokenizeRequest(chat=chat))).token_ids) == b"u:x\n"


async def test_detokenize(serve: Serve) -> None:
    async with serve() as served:
        request = api.DetokenizeRequest(token_ids=[72, 105, END_TOKEN])
        assert (await served.stub.Detokenize(request)).text == "Hi<end>"
        request.skip_special_tokens = True
        assert (await served.stub.Detokenize(request)).text == "Hi"


async def test_model_info(serve: Serve) -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, stop_token_ids=(5,), logit_bias={3: 1.0})
    async with serve(FakeLLM(default_sampling=defaults)) as served:
        info = await served.stub.GetModelInfo(api.GetModelInfoRequest())
        assert (info.name, info.architecture, info.vocab_size, info.max_model_len) == ("fake", "echo", 257, 4096)
        assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (2, 4, 2, 16)
        assert (list(info.eos_token_ids), info.has_chat_template) == ([END_TOKEN], True)
        assert (info.default_sampling.temperature, info.default_sampling.top_k) == (0.6, 20)
        assert (list(info.default_sampling.stop_token_ids), dict(info.default_sampling.logit_bias)) == ([5], {3: 1.0})
        assert not info.default_sampling.HasField("seed")


async def test_status_counts_requests_and_tokens(serve: Serve) -> None:
    async with serve() as served:
        for _ in range(3):
            [_ async for _ in served.stub.Generate(generate(max_tokens=5))]
        status = await served.until(lambda status: status.engine.num_finished == 3)
        assert (status.counters.received, status.counters.finished) == (3, 3)
        assert (status.engine.completion_tokens, status.engine.max_num_seqs) == (15, 4)
        assert status.uptime_s > 0


async def test_the_server_answers_while_a_long_prompt_is_tokenised_and_a_step_runs(serve: Serve) -> None:
    llm = FakeLLM(gated=True)
    async with serve(llm) as served:
        running = served.stub.Generate(generate())
        await running.read()  # the engine stands in a step now
        entered, release = threading.Event(), threading.Event()

        def hold() -> None:
            entered.set()
            release.wait(PATIENCE_S)

        llm.in_tokenize = hold
        tokenizing = asyncio.ensure_future(served.stub.Tokenize(api.TokenizeRequest(text="ab")))
        await asyncio.to_thread(entered.wait, PATIENCE_S)
        assert (await served.status()).engine.num_waiting == 1
        assert not tokenizing.done()
        release.set()
        assert list((await tokenizing).token_ids) == [97, 98]
        running.cancel()
