"""sample: choose a token for every row of logits [L, V] float32 (semantics in ``Backend.sample``).

    penalties and bias, one rounding each, in float32 → l;   w = (l - max l) / temperature;   p = e^w   (in float64)
    top-k: l ≥ the k-th largest;   top-p: p ≥ the last p needed to reach top_p of what is left;   min-p: p ≥ min_p
    draw: argmax of p_i / -log u_i, u from Philox-4x32-10 (Salmon et al. 2011)

Nothing sorts the vocabulary: the k-th largest is found by radix selection, the nucleus by a histogram of probability
over w. NaN counts as -inf; if nothing is above -inf the lowest id is chosen; +inf is certain, the lowest id of them.

Bytes moved: the logits once for greedy rows; some passes over them, from L2, otherwise.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from numba_engine.backends.cpu.compilation import inner, kernel_address, launcher
from numba_engine.backends.cpu.intrinsics import (
    LANES,
    Emitter,
    emit,
    f32_bits,
    i32,
    i64,
    load_f32,
    load_i32,
    load_i64,
    pointer_f32,
    pointer_i32,
    store_f32,
    store_i32,
    vf32,
    vi32,
)
from numba_engine.backends.cpu.thread_team import ARGS, run

(_LOGITS, _V, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _SEED, _OUTPUT_INDEX, _HISTORY_OFFSETS, _HISTORY,
 _HISTORY_PROMPT_LENS, _REPETITION, _PRESENCE, _FREQUENCY, _BIAS_OFFSETS, _BIAS_IDS, _BIAS_VALUES, _NUM_TOP, _TOKEN_IDS,
 _LOGPROBS, _TOP_IDS, _TOP_LOGPROBS, _COUNTS) = range(23)  # fmt: skip

_LEAST_EXPONENTIAL = 2.0**-33  # the least -log u there is is just above it
_MOST_EXPONENTIAL = 33 * math.log(2)
_BINS_PER_UNIT, _NUM_BINS = 64, 2048


@launcher
def sample(
    team: np.ndarray, kernel: int, logits: np.ndarray, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray,
    min_p: np.ndarray, repetition: np.ndarray, presence: np.ndarray, frequency: np.ndarray, seed: np.ndarray,
    output_index: np.ndarray, history_offsets: np.ndarray, history: np.ndarray, history_prompt_lens: np.ndarray,
    bias_offsets: np.ndarray, bias_ids: np.ndarray, bias_values: np.ndarray, num_top: int, counts: np.ndarray,
    token_ids: np.ndarray, logprobs: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray,
) -> None:  # fmt: skip
    """``num_top`` -1: no log-probabilities. ``counts``: scratch [L or 1, V] int32 of zeros, and zeros again afterwards."""
    rows, vocab = logits.shape
    team[ARGS + _LOGITS] = logits.ctypes.data
    team[ARGS + _V] = vocab
    team[ARGS + _TEMPERATURE] = temperature.ctypes.data
    team[ARGS + _TOP_K] = top_k.ctypes.data
    team[ARGS + _TOP_P] = top_p.ctypes.data
    team[ARGS + _MIN_P] = min_p.ctypes.data
    team[ARGS + _SEED] = seed.ctypes.data
    team[ARGS + _OUTPUT_INDEX] = output_index.ctypes.data
    team[ARGS + _NUM_TOP] = num_top
    team[ARGS + _TOKEN_IDS] = token_ids.ctypes.data
    team[ARGS + _LOGPROBS] = logprobs.ctypes.data
    team[ARGS + _TOP_IDS] = top_ids.ctypes.data
    team[ARGS + _TOP_LOGPROBS] = top_logprobs.ctypes.data
    team[ARGS + _HISTORY_OFFSETS] = history_offsets.ctypes.data
    team[ARGS + _HISTORY] = history.ctypes.data
    team[ARGS + _HISTORY_PROMPT_LENS] = history_prompt_lens.ctypes.data
    team[ARGS + _REPETITION] = repetition.ctypes.data
    team[ARGS + _PRESENCE] = presence.ctypes.data
    team[ARGS + _FREQUENCY] = frequency.ctypes.data
    team[ARGS + _BIAS_OFFSETS] = bias_offsets.ctypes.data
    team[ARGS + _BIAS_IDS] = bias_ids.ctypes.data
    team[ARGS + _BIAS_VALUES] = bias_values.ctypes.data
    team[ARGS + _COUNTS] = counts.ctypes.data
    run(team, kernel, rows, 1)


@functools.cache
def sample_kernel() -> int:
    def sample_rows(begin: int, end: int, args: int) -> None:
        vocab, num_top = load_i64(args, _V), load_i64(args, _NUM_TOP)
        for row in range(begin, end):
            address = load_i64(args, _LOGITS) + row * vocab * 4
            logits = carray(pointer_f32(address), (vocab,), np.float32)
            log_total = 0.0
            if num_top >= 0:
                log_total = log_sum_exp(address, logits)
                ids = carray(pointer_i32(load_i64(args, _TOP_IDS) + row * num_top * 4), (num_top,), np.int32)
                values = carray(pointer_f32(load_i64(args, _TOP_LOGPROBS) + row * num_top * 4), (num_top,), np.float32)
                top_logprobs(logits, log_total, ids, values)
            history_begin = load_i32(load_i64(args, _HISTORY_OFFSETS), row)
            history_end = load_i32(load_i64(args, _HISTORY_OFFSETS), row + 1)
            bias_begin = load_i32(load_i64(args, _BIAS_OFFSETS), row)
            bias_end = load_i32(load_i64(args, _BIAS_OFFSETS), row + 1)
            changed = history_end > history_begin or bias_end > bias_begin
            raw = logits.copy() if changed and num_top >= 0 else logits
            apply_penalties(args, row, logits, history_begin, history_end)
            for i in range(bias_begin, bias_end):
                token = load_i32(load_i64(args, _BIAS_IDS), i)
                if 0 <= token < vocab:
                    logits[token] += load_f32(load_i64(args, _BIAS_VALUES), i)
            chosen = argmax(address, vocab)
            temperature = load_f32(load_i64(args, _TEMPERATURE), row)
            if temperature > 0 and abs(logits[chosen]) < np.inf:
                chosen = draw(
                    logits, chosen, temperature, load_i32(load_i64(args, _TOP_K), row),
                    load_f32(load_i64(args, _TOP_P), row), load_f32(load_i64(args, _MIN_P), row),
                    np.uint64(load_i64(load_i64(args, _SEED), row)),
                    np.uint32(load_i32(load_i64(args, _OUTPUT_INDEX), row)),
                )  # fmt: skip
            store_i32(load_i64(args, _TOKEN_IDS), row, chosen)
            if num_top >= 0:
                store_f32(load_i64(args, _LOGPROBS), row, np.float32(raw[chosen] - log_total))

    return kernel_address(sample_rows, "void(int64, int64, int64)")


@inner
def apply_penalties(args: int, row: int, logits: np.ndarray, begin: int, end: int) -> None:
    """Each token seen, once: repetition in prompt or output, presence and frequency in the output alone."""
    if begin == end:
        return
    vocab = logits.size
    history = load_i64(args, _HISTORY)
    repetition = load_f32(load_i64(args, _REPETITION), row)
    presence = load_f32(load_i64(args, _PRESENCE), row)
    frequency = load_f32(load_i64(args, _FREQUENCY), row)
    output_begin = begin + load_i32(load_i64(args, _HISTORY_PROMPT_LENS), row)
    # Counts of outputs, plus one in bit 30 for "seen"; a visit takes the entry back to zero.
    counts = carray(pointer_i32(load_i64(args, _COUNTS) + row * vocab * 4), (vocab,), np.int32)
    for i in range(begin, end):
        token = load_i32(history, i)
        if 0 <= token < vocab:
            counts[token] |= 1 << 30
            if i >= output_begin:
                counts[token] += 1
    for i in range(begin, end):
        token = load_i32(history, i)
        if 0 <= token < vocab and counts[token] != 0:
            count = counts[token] & ((1 << 30) - 1)
            counts[token] = 0
            value = logits[token]
            value = value / repetition if value > 0 else value * repetition
            if count > 0:
                value = value - presence
                value = value - frequency * np.float32(count)
            logits[token] = value


@inner
def draw(
    logits: np.ndarray, best: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, counter: int
) -> int:
    """``best`` is the id of the largest logit, which is finite."""
    vocab = logits.size
    largest = np.float64(logits[best])
    inverse = 1.0 / np.float64(temperature)
    floor = -np.inf  # least logit that is kept
    if 0 < top_k < vocab:
        floor = kth_largest(logits, top_k)
    if top_p < 1:
        floor = nucleus_floor(logits, largest, inverse, floor, top_p)
    least_w = math.log(min_p) if min_p > 0 else -np.inf
    key0, key1 = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32))

    chosen = np.int64(best)
    best_key = 1.0 / exponential(philox(chosen >> 2, counter, key0, key1), chosen & 3)
    # p / e ≤ best_key for every possible e: no need to draw
    least_useful_w = math.log(best_key * _LEAST_EXPONENTIAL)
    for group in range((vocab + 3) // 4):
        first = 4 * group
        drawn = False
        bits = (np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0))
        for lane in range(min(4, vocab - first)):
            token = first + lane
            value = np.float64(logits[token])
            w = (value - largest) * inverse
            if not (value >= floor and w >= least_w and w >= least_useful_w):
                continue
            if not drawn:
                bits = philox(group, counter, key0, key1)
                drawn = True
            key = math.exp(w) / exponential(bits, lane)
            if key > best_key or (key == best_key and token < chosen):
                best_key = key
                chosen = token
                least_useful_w = math.log(best_key * _LEAST_EXPONENTIAL)
    return chosen


@inner
def exponential(bits: tuple[int, int, int, int], lane: int) -> float:
    """-log u, u = (bits + 0.5) 2^-32 in (0, 1)."""
    word = bits[0] if lane == 0 else bits[1] if lane == 1 else bits[2] if lane == 2 else bits[3]
    return -math.log((np.float64(word) + 0.5) * 2.0**-32)


@inner
def philox(block: int, counter: int, key0: int, key1: int) -> tuple[int, int, int, int]:
    """Philox-4x32-10 of the counter (block, counter, 0, 0)."""
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = np.uint64(block), np.uint64(counter), np.uint64(0), np.uint64(0)
    k0, k1 = np.uint64(key0), np.uint64(key1)
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * c0
        p1 = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & mask, (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & mask
        k0 = (k0 + np.uint64(0x9E3779B9)) & mask
        k1 = (k1 + np.uint64(0xBB67AE85)) & mask
    return np.uint32(c0), np.uint32(c1), np.uint32(c2), np.uint32(c3)


@inner
def ordered(value: float) -> int:
    """Integers 0 … 2^32 - 1 in the order of float32 values; NaN lowest."""
    if value != value:
        return 0
    bits = f32_bits(np.float32(value) + np.float32(0))
    return (0xFFFFFFFF - bits) if bits >= 0x80000000 else bits + 0x80000000


@inner
def kth_largest(logits: np.ndarray, k: int) -> float:
    """The k-th largest value, by three rounds of counting on 11, 11 and 10 bits."""
    counts = np.empty(2048, dtype=np.int64)
    prefix, mask, wanted = 0, 0, k
    for shift, bits in ((21, 11), (10, 11), (0, 10)):
        counts[:] = 0
        digits = (1 << bits) - 1
        for i in range(logits.size):
            key = ordered(logits[i])
            if key & mask == prefix:
                counts[(key >> shift) & digits] += 1
        digit = digits
        while counts[digit] < wanted:
            wanted -= counts[digit]
            digit -= 1
        prefix |= digit << shift
        mask |= digits << shift
    for i in range(logits.size):
        if ordered(logits[i]) == prefix:
            return np.float64(logits[i])
    return -np.inf


@inner
def nucleus_floor(logits: np.ndarray, largest: float, inverse: float, floor: float, top_p: float) -> float:
    """The least logit of the smallest set of most likely tokens, of those ≥ floor, that reaches top_p of their sum."""
    masses = np.zeros(_NUM_BINS, dtype=np.float64)
    for i in range(logits.size):
        value = np.float64(logits[i])
        if value >= floor:
            w = (value - largest) * inverse
            masses[bin_of(w)] += math.exp(w)
    needed = np.float64(top_p) * masses.sum()
    reached = 0.0
    crossing = 0
    while crossing < _NUM_BINS - 1 and reached + masses[crossing] < needed:
        reached += masses[crossing]
        crossing += 1
    count = 0
    for i in range(logits.size):
        value = np.float64(logits[i])
        if value >= floor and bin_of((value - largest) * inverse) == crossing:
            count += 1
    members = np.empty(count, dtype=np.float64)
    count = 0
    for i in range(logits.size):
        value = np.float64(logits[i])
        if value >= floor and bin_of((value - largest) * inverse) == crossing:
            members[count] = value
            count += 1
    members.sort()
    for i in range(count - 1, -1, -1):
        reached += math.exp((members[i] - largest) * inverse)
        if reached >= needed:
            return members[i]
    return members[0] if count else floor


@inner
def bin_of(w: float) -> int:
    return min(_NUM_BINS - 1, int(-w * _BINS_PER_UNIT)) if w > -1e6 else _NUM_BINS - 1


@inner
def log_sum_exp(address: int, logits: np.ndarray) -> float:
    largest = np.float64(logits[argmax(address, logits.size)])
    if abs(largest) == np.inf:
        return largest
    total = 0.0
    for i in range(logits.size):
        value = np.float64(logits[i])
        if value == value:
            total += math.exp(value - largest)
    return largest + math.log(total)


@inner
def top_logprobs(logits: np.ndarray, log_total: float, ids: np.ndarray, values: np.ndarray) -> None:
    """The ids.size largest, largest first, ties by lower id, by insertion: almost every value fails the first test."""
    n = ids.size
    filled = 0
    for i in range(logits.size):
        value = logits[i]
        if n == 0 or value != value or (filled == n and not value > values[n - 1]):
            continue
        at = filled if filled < n else n - 1
        while at > 0 and values[at - 1] < value:
            values[at] = values[at - 1]
            ids[at] = ids[at - 1]
            at -= 1
        values[at] = value
        ids[at] = i
        filled = min(n, filled + 1)
    for i in range(filled, n):  # fewer numbers than asked for: the rest are NaN
        ids[i] = 0
        values[i] = -np.inf
    for i in range(filled):
        values[i] = np.float32(values[i] - log_total)


def _argmax(b: ir.IRBuilder, address: ir.Value, n: ir.Value) -> ir.Value:
    """Index of the largest, ties to the lowest index, NaN skipped; 0 if nothing is above -inf."""
    e = Emitter(b)
    largest, where = cgutils.alloca_once(b, vf32), cgutils.alloca_once(b, vi32)
    b.store(e.const(vf32, float("-inf")), largest)
    b.store(e.const(vi32, 2**31 - 1), where)
    lane_ids = ir.Constant(vi32, list(range(LANES)))

    def take(values: ir.Value, first: ir.Value, valid: ir.Value | None) -> None:
        better = b.fcmp_ordered(">", values, b.load(largest))
        if valid is not None:
            better = b.and_(better, valid)
        index = b.add(e.splat(b.trunc(first, i32)), lane_ids)
        b.store(b.select(better, values, b.load(largest)), largest)
        b.store(b.select(better, index, b.load(where)), where)

    whole = b.lshr(n, e.int(4))
    with e.loop(whole) as i:
        take(e.load(e.at(address, i, 4 * LANES), vf32, 4), b.shl(i, e.int(4)), None)
    start = b.shl(whole, e.int(4))
    rest = e.first_lanes(b.and_(n, e.int(LANES - 1)))
    take(e.masked_load(e.at(address, start, 4), vf32, rest, 4), start, rest)

    top = e.reduce(b.load(largest), lambda x, y: e.binary("maxnum", x, y))
    is_top = b.fcmp_ordered("==", b.load(largest), e.splat(top))
    candidates = b.select(is_top, b.load(where), e.const(vi32, 2**31 - 1))
    lowest = e.reduce(candidates, lambda x, y: e.binary("smin", x, y))
    none = b.icmp_signed("==", lowest, e.int(2**31 - 1, i32))
    return b.sext(b.select(none, e.int(0, i32), lowest), i64)


argmax = emit("argmax", types.int64, 2, _argmax)
