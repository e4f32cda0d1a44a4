"""Random arrivals, lengths, stops and aborts; each request is compared with itself alone in another engine."""

from __future__ import annotations

import numpy as np

from numba_engine import LLM, FinishReason, PositionLogprobs, RequestOutput, SamplingParams


def random_settings(rng: np.random.Generator) -> dict[str, int]:
    """Of an engine in which requests have to wait, and are preempted."""
    num_kv_blocks, max_num_seqs = int(rng.integers(12, 40)), int(rng.integers(1, 8))
    return {"num_kv_blocks": num_kv_blocks, "max_model_len": 96, "max_num_seqs": max_num_seqs, "block_size": 8}


def check_random_requests(engine: LLM, alone: LLM, rng: np.random.Generator) -> None:
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    got: dict[str, list[int]] = {}
    scored: dict[str, list[PositionLogprobs]] = {}
    ended: dict[str, FinishReason] = {}
    aborted = set()

    def note(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            got[output.request_id] += output.token_ids
            scored[output.request_id] += output.logprobs
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason

    for i in range(120):
        if i < 100 and rng.random() < 0.15:
            request_id = f"r{i}"
            own = SamplingParams(
                temperature=float(rng.choice([0.0, 1.0])),
                top_k=int(rng.choice([0, 5])),
                seed=int(rng.integers(2**63)) * 2 + 1,
                max_tokens=int(rng.integers(1, 40)),
                stop_token_ids=tuple(rng.integers(0, 300, 4).tolist()),
                presence_penalty=float(rng.choice([0.0, 0.0, 0.0, 0.5])),
                repetition_penalty=float(rng.choice([1.0, 1.0, 1.2])),
                logit_bias={int(i): float(rng.normal()) * 9 for i in rng.integers(0, 300, rng.choice([0, 0, 5]))},
                logprobs=rng.choice([None, None, None, 0, 3, 20]),
            )
            asked[request_id] = rng.integers(3, 300, rng.integers(1, 40)).tolist(), own
            got[request_id], scored[request_id] = [], []
            engine.add_request(request_id, *asked[request_id])
        if rng.random() < 0.03 and (alive := sorted(asked.keys() - ended.keys())):
            victim = str(rng.choice(alive))
            aborted.add(victim)
            last = engine.abort(victim)
            assert last is not None
            note([last])
        note(engine.step())
    while engine.has_unfinished:
        note(engine.step())
    assert ended.keys() == asked.keys()
    assert engine.stats.num_free_kv_blocks == engine.stats.num_kv_blocks
    for request_id, (prompt, own) in asked.items():
        expected = alone.generate(prompt, own)[0]
        if request_id in aborted:
            assert tuple(got[request_id]) == expected.token_ids[: len(got[request_id])]
        else:
            assert (tuple(got[request_id]), ended[request_id]) == (expected.token_ids, expected.finish_reason)
            assert tuple(scored[request_id]) == expected.logprobs
