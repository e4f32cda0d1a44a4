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
    text = (
        f"All {format_bytes(walk.model.weight_bytes)} of weights lay in memory before this token began, and still the"
        f" step had {format_bytes(decode.weight_bytes)} brought to the units"
    )
    figures: dict[str, float] = {
        "resident_weight_bytes": walk.model.weight_bytes,
        "moved_weight_bytes": decode.weight_bytes,
        "flops": decode.flops,
    }
    if walk.is_simulated:
        text += f", for {format_count(decode.flops)} FLOPs: {decode.intensity:.1f} for each byte."
    else:
        text += (
            f", and took {format_time(decode.time_s)}. Had they been beside the units already, the arithmetic alone"
            f" would have been left: {format_count(decode.flops)} FLOPs, {format_time(budget.arithmetic_s)} at the"
            f" {budget.best_gflops:.1f} GFLOP/s that the units reached elsewhere in this run. So the units had nothing"
            f" to do for at least {budget.idle_share:.0%} of the token."
        )
        figures |= {
            "time_s": decode.time_s,
            "arithmetic_s": budget.arithmetic_s,
            "idle_share": budget.idle_share,
        }
    return Answer(
        "Are “the weights are already in memory” and “the weights are already beside the arithmetic units” the same?",
        "No.",
        text,
        figures,
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
    bandwidth = 0.0 if walk.is_simulated else walk.budget.read_bandwidth_gbps
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
    text = (
        f"A prompt of {format_plural(wide.num_tokens, 'token')} went through in"
        f" {format_plural(wide.num_steps, 'step')}: {format_bytes(wide.weight_bytes)} of weights read, or"
        f" {format_bytes(round(wide.weight_bytes_per_token))} a token, and {wide.intensity:,.1f} FLOPs for each byte"
        f" from memory. The decoding step read {format_bytes(decode.weight_bytes)} for its one token, and had"
        f" {decode.intensity:.1f} FLOPs for each byte."
    )
    figures: dict[str, float] = {
        "prefill_tokens": wide.num_tokens,
        "prefill_weight_bytes_per_token": wide.weight_bytes_per_token,
        "prefill_intensity": wide.intensity,
        "decode_weight_bytes_per_token": decode.weight_bytes_per_token,
        "decode_intensity": decode.intensity,
    }
    if not walk.is_simulated:
        faster = decode.time_per_token_s / wide.time_per_token_s
        text += (
            f" So a token of the prompt took {format_time(wide.time_per_token_s)}, at {wide.gflops:.1f} GFLOP/s, and"
            f" the decoded one {format_time(decode.time_per_token_s)}, at {decode.gflops:.1f} GFLOP/s:"
            f" {faster:.1f} times as long."
        )
        figures |= {
            "prefill_time_per_token_s": wide.time_per_token_s,
            "decode_time_per_token_s": decode.time_per_token_s,
        }
    return Answer(
        "Why does prefill spread the reading of weights over more than decoding a small batch does?",
        "What is read once serves all tokens of the prompt.",
        text,
        figures,
    )


def _what_the_cache_saves(walk: Walk) -> Answer:
    again, decode = walk.recompute, walk.decode
    share = decode.kv_bytes / decode.memory_bytes
    without, with_it = format_count(again.flops) + " FLOPs", format_count(decode.flops) + " FLOPs"
    figures: dict[str, float] = {
        "recompute_flops": again.flops,
        "recompute_weight_bytes": again.weight_bytes,
        "decode_flops": decode.flops,
        "decode_weight_bytes": decode.weight_bytes,
        "decode_kv_bytes": decode.kv_bytes,
    }
    if not walk.is_simulated:
        without += f" and {format_time(again.time_s)}"
        with_it += f" and {format_time(decode.time_s)}"
        figures |= {"recompute_time_s": again.time_s, "decode_time_s": decode.time_s}
    return Answer(
        "Does the KV cache save computing past tokens again, or reading the weights for the current token?",
        "Computing the past again.",
        f"The same {again.context_len} tokens without a cache, all of them taken through the model again, were"
        f" {without}; with it the step was {with_it}. The weights read were {format_bytes(again.weight_bytes)} without"
        f" and {format_bytes(decode.weight_bytes)} with the cache: of those it saves none. It adds reading and writing"
        f" of its own, {format_bytes(decode.kv_bytes)} in this step ({share:.1%} of its bytes), which grow by"
        f" {format_bytes(walk.model.kv_bytes_per_token)} with every token of context.",
        figures,
    )
