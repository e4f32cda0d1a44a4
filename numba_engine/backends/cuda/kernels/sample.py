"""sample: choose a token for every row of logits, all on the device (semantics in ``Backend.sample``).

Arrays (flat): logits float32 [L, vocab]; the parameters of ``Sampling`` [L]; token_ids int32 [L]. Four kernels:

``logprob_totals``   log Σ exp of the raw logits, and the n most likely tokens, if log-probabilities are wanted;
``penalties``        repetition, presence, frequency, bias, in place; only for tokens that appear, never the whole row;
``sample``           greedy, or top-k, top-p, min-p and the draw;
``chosen_logprobs``  of the chosen tokens, from the raw logits.

Grid: a block a row; of ``sample`` a block for each 2048 tokens of a row, of which the last to arrive finishes it. A
warp's 128 tokens are a group. Its largest logit says whether anything in it matters to what is decided later, so the
last block looks at few groups again, and what it decides of them is what it would decide of the whole row:

greedy      the best of the groups' best; none again.
no filter   a group's own race, run with its own maximum, tells its race with the row's but for rounding: the groups
            that come within rounding of the best (nearly always one) race again.
top-k       the k-th largest of the groups' maxima is a lower bound of the k-th largest logit, and k groups reach it;
            with fewer groups than k all are looked at again.
top-p       needs the sum of all, which is in units of the row's maximum: once over the row; then what the bins so far
            leave.
min-p       the groups whose maximum is likely enough.

Top-k and top-p need no sort: a threshold on the logit is found by radix selection, three rounds of 11, 11 and 10 bits
of its order-preserving integer. Each round is a histogram in shared memory, of counts for top-k and of probability for
top-p, the latter in integers of 2^-32, so that no sum depends on an order. The draw is an exponential race: the argmax
of p_i / -log u_i, u_i from Philox-4x32-10 (Salmon et al. 2011) keyed by seed and counted by token and position.

-log u is wanted to float32 accuracy on all of (0, 1) without float64: u = (bits + ½) 2^-32 above ½ is taken from its
complement, and -log(1 - v) = 2 artanh(v / (2 - v)), a series in s² ≤ 1/9.

Shared memory of ``sample``: the histogram [2048], sums of its parts, the groups' maxima. Bytes moved: the logits once,
16 bytes a lane; 12 bytes a group out and in; of the groups that matter 512 bytes each, in every round of a filter
(three of top-k, three of top-p) and in the draw, from L2.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, int64, uint32, uint64

from numba_engine.backends.arrays import Array
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.arrivals import is_last_to_arrive
from numba_engine.backends.cuda.kernels.intrinsics import (
    as_bits,
    as_float,
    divide,
    exp2,
    fma,
    load_quad,
    log2,
    select,
    to_fixed,
)
from numba_engine.backends.cuda.kernels.reductions import FULL_WARP, sum_block
from numba_engine.backends.sampling import Sampled, Sampling

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

THREADS = 512
WARPS = THREADS // 32
BINS = 2048
BINS_PER_THREAD = BINS // THREADS
GROUP = 128
"""Tokens that a warp looks at together, four a lane."""
SLICE = GROUP * WARPS
"""Tokens of a block."""
SLACK = 1 - 2.0**-14
"""By what factor float32 may have a race lower, or a probability, than another that is no lower by exact arithmetic.

A logit's distance from the maximum, in powers of 2, has three roundings, each of 2^-24 of it. A race can be won with
-log u between 2^-33 and 23, so with a distance up to 38 only: an error of 80 · 2^-24 of p. exp2 and the quotient add at
most 5 · 2^-24. Twice that for a race with the group's maximum and the group's p against one with the row's maximum,
twice again for two groups: 2^-15.
"""
PENALTY_THREADS = 256
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@cuda.jit(device=True, inline="always")
def _ordered(value):  # type: ignore[no-untyped-def]
    """uint32 in the order of float32 values; NaN counts as -inf, -0 as 0."""
    bits = as_bits(float32(value + float32(0)))
    if value != value:
        bits = uint32(0xFF800000)
    return uint32(~bits) if bits >= uint32(0x80000000) else uint32(bits | uint32(0x80000000))


@cuda.jit(device=True, inline="always")
def _value_of(ordered):  # type: ignore[no-untyped-def]
    """The float32 that ``_ordered`` made the integer of."""
    bits = uint32(ordered)
    return as_float(uint32(bits & uint32(0x7FFFFFFF)) if bits >= uint32(0x80000000) else uint32(~bits))


@cuda.jit(device=True, inline="always")
def _is_finite(value):  # type: ignore[no-untyped-def]
    return uint32(as_bits(value) & uint32(0x7F800000)) != uint32(0x7F800000)


@cuda.jit(device=True, inline="always")
def _lowest_bit(word):  # type: ignore[no-untyped-def]
    """Its number; the word is not 0."""
    return uint32(cuda.ffs(word) - 1)


@cuda.jit(device=True, inline="always")
def _candidate(rank, token):  # type: ignore[no-untyped-def]
    """A key whose maximum is the largest rank, and of those the lowest token."""
    return uint64((uint64(rank) << uint64(32)) | uint64(uint32(~token)))


@cuda.jit(device=True, inline="always")
def _max_of_warp(value):  # type: ignore[no-untyped-def]
    """The largest uint64 of the warp's 32 lanes, in every one of them."""
    for log2_distance in range(5):
        other = cuda.shfl_xor_sync(FULL_WARP, int64(value), int32(int32(1) << int32(log2_distance)))
        value = max(value, uint64(other))
    return value


@cuda.jit(device=True, inline="always")
def _max_of_block(value, warp_maxima):  # type: ignore[no-untyped-def]
    """The largest uint64 of the block, in every thread; synchronises before and after it writes ``warp_maxima``."""
    thread = uint32(cuda.threadIdx.x)
    value = _max_of_warp(value)
    cuda.syncthreads()
    if uint32(thread & uint32(31)) == uint32(0):
        warp_maxima[uint32(thread >> uint32(5))] = value
    cuda.syncthreads()
    largest = uint64(0)
    for warp in range(WARPS):
        largest = max(largest, warp_maxima[warp])
    return largest


@cuda.jit(device=True, inline="always")
def _best_of_row(warp_maxima, logits, first, vocab, below):  # type: ignore[no-untyped-def]
    """The largest candidate under ``below`` of the row."""
    mine = uint64(0)
    token = uint32(cuda.threadIdx.x)
    while token < vocab:
        candidate = _candidate(_ordered(logits[uint32(first + token)]), token)
        if candidate < below:
            mine = max(mine, candidate)
        token = uint32(token + uint32(THREADS))
    return _max_of_block(mine, warp_maxima)


@cuda.jit(device=True, inline="always")
def _four_logits(logits, first, token, vocab):  # type: ignore[no-untyped-def]
    """Those of token … token + 3, where there are such tokens; else any others of the row."""
    last = uint32(vocab - uint32(1))
    if uint32(vocab & uint32(3)) == uint32(0):
        values = load_quad(logits, uint32(first + min(token, uint32(vocab - uint32(4)))))
    else:
        values = (
            logits[uint32(first + min(token, last))],
            logits[uint32(first + min(uint32(token + uint32(1)), last))],
            logits[uint32(first + min(uint32(token + uint32(2)), last))],
            logits[uint32(first + min(uint32(token + uint32(3)), last))],
        )
    return values


@cuda.jit(device=True, inline="always")
def _probability(logit, largest, temperature):  # type: ignore[no-untyped-def]
    """exp((logit - largest) / temperature), 0 for NaN."""
    p = exp2(float32(divide(float32(logit - largest), temperature) * float32(LOG2_E)))
    return p if p == p else float32(0)


@cuda.jit(device=True, inline="always")
def _exponential(bits):  # type: ignore[no-untyped-def]
    """-log((bits + ½) 2^-32)."""
    is_upper = bits >= uint32(0x80000000)
    u = fma(float32(uint32(~bits) if is_upper else bits), float32(2.0**-32), float32(2.0**-33))
    # Below ½: u = (1 - v) 2^-k with 1 - v in [½, 1).
    mantissa = as_float(uint32((as_bits(u) & uint32(0x007FFFFF)) | uint32(0x3F000000)))
    k = float32(int32(126) - int32(as_bits(u) >> uint32(23)))
    v = select(is_upper, u, float32(float32(1) - mantissa))
    s = divide(v, float32(float32(2) - v))
    t = float32(s * s)
    series = fma(t, float32(1 / 15), float32(1 / 13))
    series = fma(t, series, float32(1 / 11))
    series = fma(t, series, float32(1 / 9))
    series = fma(t, series, float32(1 / 7))
    series = fma(t, series, float32(1 / 5))
    series = fma(t, series, float32(1 / 3))
    series = fma(t, series, float32(1))
    return fma(select(is_upper, float32(0), k), float32(LN_2), float32(float32(s + s) * series))


@cuda.jit(device=True, inline="always")
def _philox(block, counter, key0, key1):  # type: ignore[no-untyped-def]
    """Philox-4x32-10 of the counter (block, counter, 0, 0)."""
    c0, c1, c2, c3 = block, counter, uint32(0), uint32(0)
    for _ in range(10):
        p0 = uint64(uint64(0xD2511F53) * uint64(c0))
        p1 = uint64(uint64(0xCD9E8D57) * uint64(c2))
        c0 = uint32(uint32(p1 >> uint64(32)) ^ c1 ^ key0)
        c2 = uint32(uint32(p0 >> uint64(32)) ^ c3 ^ key1)
        c1, c3 = uint32(p1), uint32(p0)
        key0, key1 = uint32(key0 + uint32(0x9E3779B9)), uint32(key1 + uint32(0xBB67AE85))
    return c0, c1, c2, c3


@cuda.jit(device=True, inline="always")
def _groups_waiting(levels, base, num_groups, floor):  # type: ignore[no-untyped-def]
    """Bit l: group ``_group_of(base, l)`` of this warp reaches the floor. Groups side by side go to different warps."""
    group = _group_of(base, uint32(uint32(cuda.threadIdx.x) & uint32(31)))
    return cuda.ballot_sync(FULL_WARP, group < num_groups and levels[min(group, uint32(num_groups - 1))] >= floor)


@cuda.jit(device=True, inline="always")
def _group_of(base, lane):  # type: ignore[no-untyped-def]
    warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))
    return uint32(base + lane * uint32(WARPS) + ((warp + lane) & uint32(WARPS - 1)))


@cache
def sample_kernel() -> Kernel:
    def sample(  # type: ignore[no-untyped-def]
        token_ids,
        logits,
        temperatures,
        top_ks,
        top_ps,
        min_ps,
        seeds,
        output_indices,
        maxima,
        races,
        arrivals,
        num_slices,
        vocab,
    ):
        histogram = cuda.shared.array(BINS, uint64)
        parts = cuda.shared.array(THREADS, uint64)
        sums = cuda.shared.array(32, uint64)
        state = cuda.shared.array(2, uint64)  # the threshold's bits so far, how much is still wanted
        warp_maxima = cuda.shared.array(WARPS, uint64)
        arrived = cuda.shared.array(1, uint32)
        levels = cuda.shared.array(0, uint32)  # [group]: its largest logit, as _ordered
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        row, slice_of_row = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.x)
        first = uint32(row * vocab)
        num_groups = uint32(num_slices * uint32(WARPS))
        first_group = uint32(row * num_groups)
        temperature, top_p, min_p = temperatures[row], top_ps[row], min_ps[row]
        top_k = uint32(top_ks[row])
        has_top_k, has_top_p = top_k > uint32(0) and top_k < vocab, top_p < float32(1)
        seed = seeds[row]
        key0, key1 = uint32(seed), uint32(seed >> uint64(32))
        counter = output_indices[row]

        # 1. every warp: the best of its group, and how near it comes to winning the draw
        group = uint32(slice_of_row * uint32(WARPS) + warp)
        token = uint32(group * uint32(GROUP) + lane * uint32(4))
        values = _four_logits(logits, first, token, vocab)
        top = uint64(0)
        for i in range(4):
            candidate = uint32(token + uint32(i))
            if candidate < vocab:
                top = max(top, _candidate(_ordered(values[i]), candidate))
        top = _max_of_warp(top)
        race = uint64(0)
        largest = _value_of(uint32(top >> uint64(32)))
        keeps_all = not has_top_k and not has_top_p and min_p <= float32(0)
        if temperature != float32(0) and keeps_all and _is_finite(largest):
            bits = _philox(uint32(token >> uint32(2)), counter, key0, key1)
            for i in range(4):
                if uint32(token + uint32(i)) < vocab:
                    p = _probability(values[i], largest, temperature)
                    race = max(race, uint64(as_bits(divide(p, _exponential(bits[i])))))
            race = _max_of_warp(race)
        if lane == uint32(0):
            maxima[uint32(first_group + group)] = top
            races[uint32(first_group + group)] = as_float(uint32(race))
        if not is_last_to_arrive(arrivals, row, num_slices, arrived):
            return

        # 2. the last block: greedy
        top = uint64(0)
        group = thread
        while group < num_groups:
            of_group = maxima[uint32(first_group + group)]
            levels[group] = uint32(of_group >> uint64(32))
            top = max(top, of_group)
            group = uint32(group + uint32(THREADS))
        top = _max_of_block(top, warp_maxima)
        largest = _value_of(uint32(top >> uint64(32)))
        if temperature == float32(0) or not _is_finite(largest):
            if thread == uint32(0):
                token_ids[row] = int32(~uint32(top)) if largest > float32(-np.inf) else int32(-1)
            return

        # 3. the filters: top-k of the groups' maxima, top-k, top-p
        floor = uint32(1)  # least kept, as _ordered, which is never 0: that is the level of a group without tokens
        num_held = uint32((vocab + uint32(GROUP - 1)) // uint32(GROUP))
        for stage in range(3):
            is_rough, is_mass = stage == 0, stage == 2
            if has_top_p if is_mass else has_top_k and (not is_rough or top_k <= num_held):
                prefix, fixed = uint32(0), uint32(0)
                wanted = uint64(top_k)
                shift = uint32(21)
                for step in range(3):
                    digits = uint32(1023) if step == 2 else uint32(2047)
                    for i in range(BINS_PER_THREAD):
                        histogram[uint32(thread + uint32(i * THREADS))] = uint64(0)
                    cuda.syncthreads()
                    if is_rough:
                        group = thread
                        while group < num_groups:
                            level = levels[group]
                            if level >= floor and uint32(level & fixed) == prefix:
                                cuda.atomic.add(histogram, uint32(uint32(level >> shift) & digits), uint64(1))
                            group = uint32(group + uint32(THREADS))
                    else:
                        base = uint32(0)
                        while base < num_groups:
                            waiting = _groups_waiting(levels, base, num_groups, max(floor, prefix))
                            while waiting != uint32(0):
                                group = _group_of(base, _lowest_bit(waiting))
                                waiting = uint32(waiting & uint32(waiting - uint32(1)))
                                token = uint32(group * uint32(GROUP) + lane * uint32(4))
                                values = _four_logits(logits, first, token, vocab)
                                for i in range(4):
                                    ordered = _ordered(values[i])
                                    is_meant = ordered >= floor and uint32(ordered & fixed) == prefix
                                    if is_meant and uint32(token + uint32(i)) < vocab:
                                        mass = uint64(1)
                                        if is_mass:
                                            p = _probability(values[i], largest, temperature)
                                            mass = to_fixed(float32(p * float32(2.0**32)))
                                        cuda.atomic.add(histogram, uint32(uint32(ordered >> shift) & digits), mass)
                            base = uint32(base + uint32(THREADS))
                    cuda.syncthreads()
                    # From the top: which bin takes the sum to what is wanted? Sums of 16 threads, threads, then bins.
                    part = uint64(0)
                    for i in range(BINS_PER_THREAD):  # each thread begins elsewhere, against bank conflicts
                        turned = uint32((uint32(i) + (thread >> uint32(2))) & uint32(BINS_PER_THREAD - 1))
                        part += histogram[uint32(uint32(BINS - 1) - thread * uint32(BINS_PER_THREAD) - turned)]
                    parts[thread] = part
                    cuda.syncthreads()
                    if thread < uint32(32):
                        total = uint64(0)
                        for i in range(WARPS):
                            turned = uint32((uint32(i) + thread) & uint32(WARPS - 1))
                            total += parts[uint32(thread * uint32(WARPS) + turned)]
                        sums[thread] = total
                    cuda.syncthreads()
                    if thread == uint32(0):
                        if is_mass and step == 0:
                            total = uint64(0)
                            for i in range(32):
                                total += sums[i]
                            share = to_fixed(float32(top_p * float32(2.0**32)))
                            low = uint64(uint64(total & uint64(0xFFFFFFFF)) * share)
                            wanted = uint64(uint64(total >> uint64(32)) * share + (low >> uint64(32)))
                            if uint64(low & uint64(0xFFFFFFFF)) != uint64(0):
                                wanted = uint64(wanted + uint64(1))
                            wanted = max(wanted, uint64(1))  # a top_p below 2^-32 is 0 by now; the likeliest stays
                        place = uint32(0)
                        while place < uint32(31) and sums[place] < wanted:
                            wanted = uint64(wanted - sums[place])
                            place = uint32(place + uint32(1))
                        place = uint32(place * uint32(WARPS))
                        last = uint32(place + uint32(WARPS - 1))
                        while place < last and parts[place] < wanted:
                            wanted = uint64(wanted - parts[place])
                            place = uint32(place + uint32(1))
                        digit = uint32(uint32(BINS - 1) - place * uint32(BINS_PER_THREAD))
                        last = uint32(digit - uint32(BINS_PER_THREAD - 1))
                        while digit > last and histogram[digit] < wanted:
                            wanted = uint64(wanted - histogram[digit])
                            digit = uint32(digit - uint32(1))
                        state[0] = uint64(prefix | uint32(digit << shift))
                        state[1] = wanted
                    cuda.syncthreads()
                    prefix = uint32(state[0])
                    wanted = state[1]
                    fixed = uint32(fixed | uint32(digits << shift))
                    shift = uint32(10) if step == 0 else uint32(0)
                floor = max(floor, prefix)

        # 4. the draw, in the groups that may win it
        nearest = uint64(0)
        group = thread
        while group < num_groups:
            p = _probability(_value_of(levels[group]), largest, temperature)
            nearest = max(nearest, uint64(as_bits(float32(p * races[uint32(first_group + group)]))))
            group = uint32(group + uint32(THREADS))
        nearest = _max_of_block(nearest, warp_maxima)
        least_race = float32(as_float(uint32(nearest)) * float32(SLACK))
        least_p = float32(min_p * float32(SLACK))
        group = thread
        while group < num_groups:
            p = _probability(_value_of(levels[group]), largest, temperature)
            if p < least_p or float32(p * races[uint32(first_group + group)]) < least_race:
                levels[group] = uint32(0)
            group = uint32(group + uint32(THREADS))
        cuda.syncthreads()
        winner = uint64(0)
        base = uint32(0)
        while base < num_groups:
            waiting = _groups_waiting(levels, base, num_groups, floor)
            while waiting != uint32(0):
                group = _group_of(base, _lowest_bit(waiting))
                waiting = uint32(waiting & uint32(waiting - uint32(1)))
                token = uint32(group * uint32(GROUP) + lane * uint32(4))
                values = _four_logits(logits, first, token, vocab)
                bits = _philox(uint32(token >> uint32(2)), counter, key0, key1)
                for i in range(4):
                    candidate = uint32(token + uint32(i))
                    p = _probability(values[i], largest, temperature)
                    if candidate < vocab and p >= min_p and _ordered(values[i]) >= floor:
                        winner = max(winner, _candidate(as_bits(divide(p, _exponential(bits[i]))), candidate))
            base = uint32(base + uint32(THREADS))
        winner = _max_of_block(winner, warp_maxima)
        if thread == uint32(0):
            token_ids[row] = int32(~uint32(winner))

    parameters = (float32[::1], int32[::1], float32[::1], float32[::1], uint64[::1], uint32[::1])
    scratch = (uint64[::1], float32[::1], uint32[::1])
    return Kernel("sample", sample, (int32[::1], float32[::1], *parameters, *scratch, uint32, uint32), THREADS)


@cache
def penalties_kernel() -> Kernel:
    """Also notes the raw logits of the tokens it changes, and leaves ``counts`` [L, vocab] zero, as it wants it."""

    def penalties(  # type: ignore[no-untyped-def]
        logits,
        raw_history,
        raw_bias,
        counts,
        history_begins,
        history_ends,
        history,
        prompt_lens,
        repetitions,
        presences,
        frequencies,
        bias_begins,
        bias_ends,
        bias_token_ids,
        bias_values,
        vocab,
    ):
        thread, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        first = uint32(row * vocab)
        begin, end = uint32(history_begins[row]), uint32(history_ends[row])
        bias_begin, bias_end = uint32(bias_begins[row]), uint32(bias_ends[row])
        output_begin = uint32(begin + uint32(prompt_lens[row]))
        i = uint32(begin + thread)
        while i < end:
            place = uint32(first + uint32(history[i]))
            raw_history[i] = logits[place]
            # Twice the number of times it was put out, plus 1 for seen at all.
            cuda.atomic.or_(counts, place, uint32(1))
            if i >= output_begin:
                cuda.atomic.add(counts, place, uint32(2))
            i = uint32(i + uint32(PENALTY_THREADS))
        i = uint32(bias_begin + thread)
        while i < bias_end:
            raw_bias[i] = logits[uint32(first + uint32(bias_token_ids[i]))]
            i = uint32(i + uint32(PENALTY_THREADS))
        cuda.syncthreads()
        i = uint32(begin + thread)
        while i < end:
            place = uint32(first + uint32(history[i]))
            count = cuda.atomic.exch(counts, place, uint32(0))
            if count != uint32(0):
                value = logits[place]
                value = divide(value, repetitions[row]) if value > float32(0) else float32(value * repetitions[row])
                if count > uint32(1):
                    value = float32(value - presences[row])
                    value = float32(value - float32(frequencies[row] * float32(uint32(count >> uint32(1)))))
                logits[place] = value
            i = uint32(i + uint32(PENALTY_THREADS))
        cuda.syncthreads()
        i = uint32(bias_begin + thread)
        while i < bias_end:
            logits[uint32(first + uint32(bias_token_ids[i]))] += bias_values[i]
            i = uint32(i + uint32(PENALTY_THREADS))

    floats, integers = float32[::1], int32[::1]
    arguments = (floats, floats, floats, uint32[::1], *[integers] * 4, floats, floats, floats)
    return Kernel("penalties", penalties, (*arguments, *[integers] * 3, floats, uint32), PENALTY_THREADS)


@cache
def logprob_totals_kernel() -> Kernel:
    def logprob_totals(totals, top_ids, top_logprobs, logits, vocab, num_top):  # type: ignore[no-untyped-def]
        warp_maxima = cuda.shared.array(WARPS, uint64)
        warp_sums = cuda.shared.array(WARPS, float32)
        thread, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        first = uint32(row * vocab)
        below = uint64(0xFFFFFFFFFFFFFFFF)
        top = _best_of_row(warp_maxima, logits, first, vocab, below)
        largest = _value_of(uint32(top >> uint64(32)))
        total = float32(0)
        token = thread
        while token < vocab:
            total += _probability(logits[uint32(first + token)], largest, float32(1))
            token = uint32(token + uint32(THREADS))
        total = sum_block(total, warp_sums, WARPS)
        log_total = float32(largest + float32(log2(total) * float32(LN_2)))
        if thread == uint32(0):
            totals[row] = log_total
        n = uint32(0)
        while n < num_top:
            top = _best_of_row(warp_maxima, logits, first, vocab, below)
            if thread == uint32(0):
                place = uint32(row * num_top + n)
                top_ids[place] = int32(~uint32(top))
                top_logprobs[place] = float32(_value_of(uint32(top >> uint64(32))) - log_total)
            below = top
            n = uint32(n + uint32(1))

    arguments = (float32[::1], int32[::1], float32[::1], float32[::1], uint32, uint32)
    return Kernel("logprob_totals", logprob_totals, arguments, THREADS)


@cache
def chosen_logprobs_kernel() -> Kernel:
    """Where penalties or bias changed the chosen token's logit, its raw value is the one they noted."""

    def chosen_logprobs(  # type: ignore[no-untyped-def]
        logprobs,
        token_ids,
        logits,
        totals,
        raw_history,
        raw_bias,
        history_begins,
        history_ends,
        history,
        bias_begins,
        bias_ends,
        bias_token_ids,
        vocab,
    ):
        raw = cuda.shared.array(1, uint32)  # bits, since only integers have an atomic exchange
        thread, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        token = uint32(token_ids[row])
        if token >= vocab:  # -1: none was chosen
            if thread == uint32(0):
                logprobs[row] = float32(np.nan)
            return
        if thread == uint32(0):
            raw[0] = as_bits(logits[uint32(row * vocab + token)])
        cuda.syncthreads()
        i = uint32(uint32(history_begins[row]) + thread)
        while i < uint32(history_ends[row]):
            if uint32(history[i]) == token:
                cuda.atomic.exch(raw, 0, as_bits(raw_history[i]))
            i = uint32(i + uint32(PENALTY_THREADS))
        i = uint32(uint32(bias_begins[row]) + thread)
        while i < uint32(bias_ends[row]):
            if uint32(bias_token_ids[i]) == token:
                cuda.atomic.exch(raw, 0, as_bits(raw_bias[i]))
            i = uint32(i + uint32(PENALTY_THREADS))
        cuda.syncthreads()
        if thread == uint32(0):
            logprobs[row] = float32(as_float(raw[0]) - totals[row])

    floats, integers = float32[::1], int32[::1]
    arguments = (floats, integers, floats, floats, floats, floats, *[integers] * 6, uint32)
    return Kernel("chosen_logprobs", chosen_logprobs, arguments, PENALTY_THREADS)


def launch(backend: CudaBackend, out: Sampled, logits: Array, sampling: Sampling) -> None:
    (num_rows, vocab), float32 = logits.shape, np.dtype(np.float32)
    num_slices = -(-vocab // SLICE)
    groups = (num_rows, num_slices * WARPS)  # of whole slices; the last ones may hold no token
    s = sampling
    raw = [backend.empty(array.shape, float32) for array in (s.history, s.bias_values)]
    totals = backend.empty((num_rows,), float32)
    if out.top_token_ids is not None:
        arrays = [totals, out.top_token_ids, out.top_logprobs, logits]
        backend.launch(logprob_totals_kernel(), num_rows, [*arrays, vocab, out.top_token_ids.shape[1]])
    if s.changes_logits:
        history = [s.history_begins, s.history_ends, s.history, s.history_prompt_lens]
        penalties = [s.repetition_penalty, s.presence_penalty, s.frequency_penalty]
        biases = [s.bias_begins, s.bias_ends, s.bias_token_ids, s.bias_values]
        counts = backend.zero_counts(num_rows, vocab)
        arguments = [logits, *raw, counts, *history, *penalties, *biases, vocab]
        backend.launch(penalties_kernel(), num_rows, arguments)
    parameters = [s.temperature, s.top_k, s.top_p, s.min_p, s.seed, s.output_index]
    maxima, races = backend.empty(groups, np.dtype(np.uint64)), backend.empty(groups, float32)
    scratch = [maxima, races, backend.zero_arrivals(num_rows)]
    backend.launch(
        sample_kernel(),
        (num_slices, num_rows),
        [out.token_ids, logits, *parameters, *scratch, num_slices, vocab],
        shared_bytes=4 * groups[1],
    )
    if out.logprobs is not None:
        lists = [s.history_begins, s.history_ends, s.history, s.bias_begins, s.bias_ends, s.bias_token_ids]
        arguments = [out.logprobs, out.token_ids, logits, totals, *raw, *lists, vocab]
        backend.launch(chosen_logprobs_kernel(), num_rows, arguments)
