"""Five questions about moving weights to the arithmetic units, answered with the figures of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from numba_engine.profiling.explain.walk import Walk
from numba_engine.profiling.tables import format_bytes, format_count, format_plural, format_time

_LARGE_MODEL_BYTES = 70_000_000_000 * 2


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, its answer in words, and the numbers in it."""

    question: str
    short: str
    text: str
    figures: Mapping[str, float]


def answers(walk: Walk) -> tuple[Answer, ...]:
    return (
        _resident_or_near(walk),
        _address_or_operand(walk),
        _why_not_in_caches(walk),
        _prefill_or_decode(walk),
        _what_the_cache_saves(walk),
    )


def _resident_or_near(walk: Walk) -> Answer:
    budget, decode = walk.budget, walk.decode
    return Answer(
        "Are “the weights are already in memory” and “the weights are already beside the arithmetic units” the same?",
        "No.",
        f"All {format_bytes(walk.model.weight_bytes)} of weights lay in memory before this token began, and still the"
        f" step had {format_bytes(decode.weight_bytes)} of them brought to the units, and took"
        f" {format_time(decode.time_s)}. Had they been beside the units already, the arithmetic alone would have been"
        f" left: {format_count(decode.flops)} FLOPs, {format_time(budget.arithmetic_s)} at the"
        f" {budget.best_gflops:.1f} GFLOP/s that the units reached elsewhere in this run. So the units had nothing"
        f" to do for at least {budget.idle_share:.0%} of the token.",
        {
            "resident_weight_bytes": walk.model.weight_bytes,
            "moved_weight_bytes": decode.weight_bytes,
            "time_s": decode.time_s,
            "arithmetic_s": budget.arithmetic_s,
            "idle_share": budget.idle_share,
        },
    )


def _address_or_operand(walk: Walk) -> Answer:
    near = walk.near
    question = (
        "What does an arithmetic unit (Tensor Core, vector unit) really consume: addresses, or operands loaded near it?"
    )
    always = (
        "An address only tells a load where to fetch from; what is multiplied are the values it put into registers."
    )
    if near is None:
        return Answer(question, "Operands loaded near it.", always, {})
    cold_gbps, warm_gbps = (
        near.weight_bytes / time_s / 1e9 if time_s else 0.0 for time_s in (near.in_step_time_s, near.repeated_time_s)
    )
    if near.speedup > 1.05:
        lesson = f"{near.speedup:.1f} times as fast for no other reason than where its operands came from"
    else:
        lesson = "no faster, so its weights either do not stay in the caches or lay in them in the step already"
    return Answer(
        question,
        "Operands loaded near it.",
        f"{always} One call of the step shows it: {near.phase} with {format_bytes(near.weight_bytes)} of weights took"
        f" {format_time(near.in_step_time_s)} ({cold_gbps:.1f} GB/s) in its turn, when other weights had been through"
        f" the caches since the token before. Called again and again, with the same instructions on the same"
        f" addresses, it took {format_time(near.repeated_time_s)} ({warm_gbps:.1f} GB/s): {lesson}.",
        {
            "weight_bytes": near.weight_bytes,
            "in_step_time_s": near.in_step_time_s,
            "repeated_time_s": near.repeated_time_s,
            "speedup": near.speedup,
        },
    )


def _why_not_in_caches(walk: Walk) -> Answer:
    near_bytes = sum(level.nbytes for level in walk.caches)
    bandwidth = walk.budget.read_bandwidth_gbps
    parts = [f"70 G parameters of two bytes are {format_bytes(_LARGE_MODEL_BYTES)}."]
    figures: dict[str, float] = {"large_model_bytes": _LARGE_MODEL_BYTES}
    if near_bytes:
        named = ", ".join(f"{level.name} {format_bytes(level.nbytes)}" for level in walk.caches)
        parts.append(f"The caches of the cores used here hold {format_bytes(near_bytes)} ({named}):")
        parts.append(f"one part in {_LARGE_MODEL_BYTES / near_bytes:,.0f}.")
        ratio = walk.model.weight_bytes / near_bytes
        size = format_bytes(walk.model.weight_bytes)
        if ratio > 1:
            parts.append(f"Even this model's {size} are {ratio:.1f} times what they hold.")
        else:
            parts.append(f"This model's {size} do fit, so its rates may exceed those of memory; that one's never will.")
        figures |= {"cache_bytes": near_bytes, "model_to_caches": ratio}
    parts.append("Storage is fast for being small and close by, and registers, the closest, hold kilobytes.")
    if bandwidth:
        large_s = _LARGE_MODEL_BYTES / bandwidth / 1e9
        parts.append(f"At this machine's {bandwidth:.1f} GB/s one token of that model takes {format_time(large_s)}.")
        figures["large_model_token_s"] = large_s
    return Answer(
        "Why can caches and registers not hold all of a 70B model?", "They are too small.", " ".join(parts), figures
    )


def _prefill_or_decode(walk: Walk) -> Answer:
    wide, decode = walk.wide, walk.decode
    steps = format_plural(wide.num_steps, "step")
    faster = decode.time_per_token_s / wide.time_per_token_s if wide.time_per_token_s else 0.0
    return Answer(
        "Why does prefill spread the reading of weights over more than decoding a small batch does?",
        "What is read once serves all tokens of the prompt.",
        f"A prompt of {format_plural(wide.num_tokens, 'token')} went through in {steps}: weights read,"
        f" {format_bytes(wide.weight_bytes)}, or {format_bytes(round(wide.weight_bytes_per_token))} a token;"
        f" {wide.intensity:,.1f} FLOPs for each byte from memory; {format_time(wide.time_per_token_s)} a token at"
        f" {wide.gflops:.1f} GFLOP/s. The decoding step read {format_bytes(decode.weight_bytes)} for its one token:"
        f" {decode.intensity:.1f} FLOPs for each byte, {format_time(decode.time_s)}, {decode.gflops:.1f} GFLOP/s."
        f" A token of the prompt was {faster:.1f} times as fast.",
        {
            "prefill_tokens": wide.num_tokens,
            "prefill_weight_bytes_per_token": wide.weight_bytes_per_token,
            "prefill_time_per_token_s": wide.time_per_token_s,
            "prefill_intensity": wide.intensity,
            "decode_weight_bytes_per_token": decode.weight_bytes_per_token,
            "decode_time_per_token_s": decode.time_s,
            "decode_intensity": decode.intensity,
        },
    )


def _what_the_cache_saves(walk: Walk) -> Answer:
    again, decode = walk.recompute, walk.decode
    share = decode.kv_bytes / decode.memory_bytes
    return Answer(
        "Does the KV cache save computing past tokens again, or reading the weights for the current token?",
        "Computing the past again.",
        f"The same {again.context_len} tokens without a cache, all of them taken through the model again, were"
        f" {format_count(again.flops)} FLOPs and {format_time(again.time_s)}; with it the step was"
        f" {format_count(decode.flops)} FLOPs and {format_time(decode.time_s)}. The weights read were"
        f" {format_bytes(again.weight_bytes)} without and {format_bytes(decode.weight_bytes)} with the cache: of those"
        f" it saves none. It adds reading of its own, {format_bytes(decode.kv_bytes)} in this step ({share:.1%} of its"
        f" bytes), which grows by {format_bytes(walk.model.kv_bytes_per_token)} with every token of context.",
        {
            "recompute_flops": again.flops,
            "recompute_time_s": again.time_s,
            "recompute_weight_bytes": again.weight_bytes,
            "decode_flops": decode.flops,
            "decode_time_s": decode.time_s,
            "decode_weight_bytes": decode.weight_bytes,
            "decode_kv_bytes": decode.kv_bytes,
        },
    )
