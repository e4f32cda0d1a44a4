"""sample: choose a token for every row of logits [L, V] float32 (semantics in ``Backend.sample``).

    penalties and bias, one rounding each, in float32 → l;   w = (l - max l) / temperature;   p = e^w   (in float64)
    top-k: l ≥ the k-th largest;   top-p: p ≥ the last p needed to reach top_p of what is left;   min-p: p ≥ min_p
    draw: argmax of p_i / -log u_i, u from Philox-4x32-10 (Salmon et al. 2011)

Nothing sorts the vocabulary: the k-th largest is found by radix selection, the nucleus by a histogram of probability
over w. NaN counts as -inf; if nothing is above -inf the id is -1, its log-probability NaN; +inf is certain, the lowest
id of them.

Bytes moved: the logits once for greedy rows; some passes over them, from L2, otherwise.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from numba_engine.backends.arrays import Array
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.compilation import inner, kernel_address
from numba_engine.backends.cpu.intrinsics import (
    LANES,
    Emitter,
    emit,
    exp_f32,
    f32_bits,
    f64,
    i1,
    i32,
    i64,
    load_f32,
    load_i32,
    load_i64,
    pointer_f32,
    pointer_i32,
    stack_bytes,
    store_f32,
    store_i32,
    vf32,
    vi32,
)
from numba_engine.backends.cpu.thread_team import ARGS, run
from numba_engine.backends.sampling import Sampled, Sampling

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend

(_LOGITS, _V, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _SEED, _OUTPUT_INDEX, _HISTORY_BEGINS,
 _HISTORY_ENDS, _HISTORY, _HISTORY_PROMPT_LENS, _REPETITION, _PRESENCE, _FREQUENCY, _BIAS_BEGINS, _BIAS_ENDS,
 _BIAS_IDS, _BIAS_VALUES, _NUM_TOP, _TOKEN_IDS, _LOGPROBS, _TOP_IDS, _TOP_LOGPROBS, _COUNTS) = range(25)  # fmt: skip

GROUP_TOKENS = 4 * LANES  # drawn at once: 16 Philox blocks of 4
_BINS_PER_UNIT, _NUM_BINS = 64, 2048


def launch(backend: CpuBackend, out: Sampled, logits: Array, sampling: Sampling) -> None:
    s, (num_rows, vocab) = sampling, logits.shape
    num_top = -1 if out.top_token_ids is None else out.top_token_ids.shape[1]
    backend.call(
        sample, sample_kernel(), num_rows, vocab, num_top, logits, s.temperature, s.top_k,
        s.top_p, s.min_p, s.seed, s.output_index, s.history_begins,
        s.history_ends, s.history, s.history_prompt_lens, s.repetition_penalty,
        s.presence_penalty, s.frequency_penalty, s.bias_begins, s.bias_ends,
        s.bias_token_ids, s.bias_values, out.token_ids, out.logprobs,
        out.top_token_ids, out.top_logprobs,
        backend.zero_counts(num_rows * vocab if s.changes_logits else 0),
    )  # fmt: skip


@Command
def sample(
    team: np.ndarray, kernel: int, num_rows: int, vocab: int, num_top: int, logits: int, temperature: int, top_k: int,
    top_p: int, min_p: int, seed: int, output_index: int, history_begins: int, history_ends: int, history: int,
    history_prompt_lens: int, repetition: int, presence: int, frequency: int, bias_begins: int, bias_ends: int,
    bias_ids: int, bias_values: int, token_ids: int, logprobs: int, top_ids: int, top_logprobs: int, counts: int,
) -> None:  # fmt: skip
    """``num_top`` -1: no log-probabilities. ``counts``: scratch [L, V] int32 of zeros, and zeros again afterwards."""
    team[ARGS + _LOGITS] = logits
    team[ARGS + _V] = vocab
    team[ARGS + _TEMPERATURE] = temperature
    team[ARGS + _TOP_K] = top_k
    team[ARGS + _TOP_P] = top_p
    team[ARGS + _MIN_P] = min_p
    team[ARGS + _SEED] = seed
    team[ARGS + _OUTPUT_INDEX] = output_index
    team[ARGS + _HISTORY_BEGINS] = history_begins
    team[ARGS + _HISTORY_ENDS] = history_ends
    team[ARGS + _HISTORY] = history
    team[ARGS + _HISTORY_PROMPT_LENS] = history_prompt_lens
    team[ARGS + _REPETITION] = repetition
    team[ARGS + _PRESENCE] = presence
    team[ARGS + _FREQUENCY] = frequency
    team[ARGS + _BIAS_BEGINS] = bias_begins
    team[ARGS + _BIAS_ENDS] = bias_ends
    team[ARGS + _BIAS_IDS] = bias_ids
    team[ARGS + _BIAS_VALUES] = bias_values
    team[ARGS + _NUM_TOP] = num_top
    team[ARGS + _TOKEN_IDS] = token_ids
    team[ARGS + _LOGPROBS] = logprobs
    team[ARGS + _TOP_IDS] = top_ids
    team[ARGS + _TOP_LOGPROBS] = top_logprobs
    team[ARGS + _COUNTS] = counts
    run(team, kernel, num_rows, 1)


word_place = stack_bytes(4 * GROUP_TOKENS)


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
            history_begin = load_i32(load_i64(args, _HISTORY_BEGINS), row)
            history_end = load_i32(load_i64(args, _HISTORY_ENDS), row)
            bias_begin = load_i32(load_i64(args, _BIAS_BEGINS), row)
            bias_end = load_i32(load_i64(args, _BIAS_ENDS), row)
            changed = history_end > history_begin or bias_end > bias_begin
            raw = logits.copy() if changed and num_top >= 0 else logits
            apply_penalties(args, row, logits, history_begin, history_end)
            for i in range(bias_begin, bias_end):
                token = load_i32(load_i64(args, _BIAS_IDS), i)
                if 0 <= token < vocab:
                    logits[token] += load_f32(load_i64(args, _BIAS_VALUES), i)
            chosen = argmax(address, vocab)
            if not logits[chosen] > -np.inf:
                store_i32(load_i64(args, _TOKEN_IDS), row, -1)
                if num_top >= 0:
                    store_f32(load_i64(args, _LOGPROBS), row, np.float32(np.nan))
                continue
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
) -> Any:
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
    words = word_place(0)
    philox(words, chosen // GROUP_TOKENS, counter, key0, key1)
    best_key = 1.0 / exponential(words, chosen % GROUP_TOKENS)
    address = logits.ctypes.data
    for group in range((vocab + GROUP_TOKENS - 1) // GROUP_TOKENS):
        first = group * GROUP_TOKENS
        philox(words, group, counter, key0, key1)
        # Most tokens cannot win; those that may are looked at in float64.
        candidates = contenders(
            address + 4 * first, words, min(GROUP_TOKENS, vocab - first), np.float32(largest), np.float32(inverse),
            np.float32(floor), np.float32(best_key),
        )  # fmt: skip
        while candidates != 0:
            lane = lowest_bit(candidates)
            candidates &= candidates - 1
            token = first + lane
            value = np.float64(logits[token])
            w = (value - largest) * inverse
            if value >= floor and w >= least_w:
                key = math.exp(w) / exponential(words, lane)
                if key > best_key or (key == best_key and token < chosen):
                    best_key = key
                    chosen = token
    return chosen


@inner
def exponential(words: int, lane: int) -> float:
    """-log u, u = (bits + 0.5) 2^-32 in (0, 1)."""
    bits = np.int64(load_i32(words, lane)) & 0xFFFFFFFF
    return -math.log((np.float64(bits) + 0.5) * 2.0**-32)


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
            masses[bin_of(w)] += exp_f32(np.float32(w))
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
    return largest + math.log(sum_exp(address, logits.size, np.float32(largest)))


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

    whole = b.lshr(n, e.integer(4))
    with e.loop(whole) as i:
        take(e.load(e.at(address, i, 4 * LANES), vf32, 4), b.shl(i, e.integer(4)), None)
    start = b.shl(whole, e.integer(4))
    rest = e.first_lanes(b.and_(n, e.integer(LANES - 1)))
    take(e.masked_load(e.at(address, start, 4), vf32, rest, 4), start, rest)

    top = e.reduce(b.load(largest), lambda x, y: e.binary("maxnum", x, y))
    is_top = b.fcmp_ordered("==", b.load(largest), e.splat(top))
    candidates = b.select(is_top, b.load(where), e.const(vi32, 2**31 - 1))
    lowest = e.reduce(candidates, lambda x, y: e.binary("smin", x, y))
    none = b.icmp_signed("==", lowest, e.integer(2**31 - 1, i32))
    return b.sext(b.select(none, e.integer(0, i32), lowest), i64)


argmax = emit("argmax", types.int64, 2, _argmax)


def _sum_exp(b: ir.IRBuilder, address: ir.Value, n: ir.Value, largest: ir.Value) -> ir.Value:
    """Sum of e^(x - largest) over n float32 values, NaN as 0, in float64."""
    e = Emitter(b)
    vf64 = ir.VectorType(f64, LANES)
    total = cgutils.alloca_once(b, vf64)
    b.store(ir.Constant(vf64, None), total)

    def add(values: ir.Value, valid: ir.Value | None) -> None:
        terms = e.exp(b.fsub(values, e.splat(largest)))
        wanted = b.fcmp_ordered("ord", values, values)
        wanted = wanted if valid is None else b.and_(wanted, valid)
        terms = b.select(wanted, terms, ir.Constant(vf32, None))
        b.store(b.fadd(b.load(total), b.fpext(terms, vf64)), total)

    whole = b.lshr(n, e.integer(4))
    with e.loop(whole) as i:
        add(e.load(e.at(address, i, 4 * LANES), vf32, 4), None)
    rest = e.first_lanes(b.and_(n, e.integer(LANES - 1)))
    add(e.masked_load(e.at(address, b.shl(whole, e.integer(4)), 4), vf32, rest, 4), rest)
    return e.reduce(b.load(total), b.fadd)


sum_exp = emit("sum_exp", types.float64, 3, _sum_exp)


def _philox(b: ir.IRBuilder, out: ir.Value, group: ir.Value, counter: ir.Value, key0: ir.Value, key1: ir.Value) -> None:
    """64 words of Philox-4x32-10 to ``out``: of the blocks (16 group … + 15, counter, 0, 0), in order."""
    e = Emitter(b)
    wide = ir.VectorType(i64, LANES)
    first = e.splat(b.trunc(b.shl(group, e.integer(4)), i32))
    c = [b.add(first, ir.Constant(vi32, list(range(LANES)))), e.splat(b.trunc(counter, i32))]
    c += [ir.Constant(vi32, None)] * 2
    keys = [e.splat(b.trunc(key, i32)) for key in (key0, key1)]

    def product(factor: int, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        whole = b.mul(b.zext(x, wide), e.const(wide, factor))
        return b.trunc(b.lshr(whole, e.const(wide, 32)), vi32), b.trunc(whole, vi32)

    for _ in range(10):
        (high0, low0), (high1, low1) = product(0xD2511F53, c[0]), product(0xCD9E8D57, c[2])
        c = [b.xor(b.xor(high1, c[1]), keys[0]), low1, b.xor(b.xor(high0, c[3]), keys[1]), low0]
        keys = [b.add(key, e.const(vi32, step)) for key, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    pairs = [e.shuffle(c[i], c[i + 1], [lane + 16 * j for lane in range(16) for j in range(2)]) for i in (0, 2)]
    for quarter in range(4):
        blocks = range(4 * quarter, 4 * quarter + 4)
        lanes = [2 * block + j + 32 * pair for block in blocks for pair in range(2) for j in range(2)]
        e.store(e.shuffle(pairs[0], pairs[1], lanes), e.at(out, 64 * quarter), 64)


philox = emit("philox", types.void, 5, _philox)


def _contenders(
    b: ir.IRBuilder, logits: ir.Value, words: ir.Value, count: ir.Value, largest: ir.Value, inverse: ir.Value,
    floor: ir.Value, best_key: ir.Value,
) -> ir.Value:  # fmt: skip
    """Bit i: token i of 64 may beat best_key. e^w / -log u ≤ e^w / (1 - u), with room for float32's rounding."""
    e = Emitter(b)
    bits = e.integer(0)
    for quarter in range(4):
        mask = e.first_lanes(b.sub(count, e.integer(LANES * quarter)))
        x = e.masked_load(e.at(logits, 64 * quarter), vf32, mask, 4)
        w = b.fmul(b.fsub(x, e.splat(largest)), e.splat(inverse))
        # e^w for w rounded up: |w| 2^-22 of relative error is in reach below -20, 2^-12 covers all that is above e^-87
        upper = b.fmul(e.exp(w), e.const(vf32, 1.0 + 2.0**-12))
        word = e.load(e.at(words, 64 * quarter), vi32, 64)
        complement = b.uitofp(b.xor(word, e.const(vi32, -1)), vf32)
        one_minus_u = b.fmul(b.fadd(complement, e.const(vf32, 0.5)), e.const(vf32, 2.0**-32))
        able = b.fcmp_ordered(">=", upper, b.fmul(e.splat(best_key), one_minus_u))
        able = b.and_(b.and_(able, mask), b.fcmp_ordered(">=", x, e.splat(floor)))
        able = b.and_(able, b.fcmp_ordered(">", upper, e.const(vf32, 0.0)))
        quarter_bits = b.zext(b.bitcast(able, ir.IntType(LANES)), i64)
        bits = b.or_(bits, b.shl(quarter_bits, e.integer(LANES * quarter)))
    return bits


contenders = emit("contenders", types.int64, 7, _contenders)


def _lowest_bit(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    signature = ir.FunctionType(i64, [i64, i1])
    function = cgutils.get_or_insert_function(b.module, signature, "llvm.cttz.i64")
    return b.call(function, [bits, ir.Constant(i1, 1)])


lowest_bit = emit("lowest_bit", types.int64, 1, _lowest_bit)
"""Index of the lowest bit that is set; one is."""
