"""sample: choose a token for every row of logits, all on the device (semantics in ``Backend.sample``).

Arrays (flat): logits float32 [L, vocab]; the parameters of ``SamplingBatch`` [L]; token_ids int32 [L]. Four kernels, a
block a row:

``logprob_totals``   log Σ exp of the raw logits, and the n most likely tokens, if log-probabilities are wanted;
``penalties``        repetition, presence, frequency, bias, in place; only for tokens that appear, never the whole row;
``sample``           greedy, or top-k, top-p, min-p and the draw;
``chosen_logprobs``  of the chosen tokens, from the raw logits.

Top-k and top-p need no sort: a threshold on the logit is found by radix selection, three rounds of 11, 11 and 10 bits
of its order-preserving integer. Each round is a histogram in shared memory, of counts for top-k and of probability for
top-p, the latter in integers of 2^-32, so that no sum depends on an order. The draw is an exponential race: the argmax
of p_i / -log u_i, u_i from Philox-4x32-10 (Salmon et al. 2011) keyed by seed and counted by token and position.

-log u is wanted to float32 accuracy on all of (0, 1) without float64: u = (bits + ½) 2^-32 above ½ is taken from its
complement, and -log(1 - v) = 2 artanh(v / (2 - v)), a series in s² ≤ 1/9.

Shared memory: the histogram [2048], sums of its parts, the best candidate. Bytes moved: the logits once for greedy
rows, three times more for each filter, once more for the draw; from L2 after the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.device import Device, DeviceArray, flat
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
from numba_engine.backends.cuda.kernels.reductions import sum_block

THREADS = 512
WARPS = THREADS // 32
BINS = 2048
BINS_PER_THREAD = BINS // THREADS
PENALTY_THREADS = 256
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """``SamplingBatch`` or ``DecodeSampling`` on the device."""

    temperature: DeviceArray
    top_k: DeviceArray
    top_p: DeviceArray
    min_p: DeviceArray
    repetition_penalty: DeviceArray
    presence_penalty: DeviceArray
    frequency_penalty: DeviceArray
    seed: DeviceArray
    output_index: DeviceArray
    history_begins: DeviceArray
    history_ends: DeviceArray
    history: DeviceArray
    history_prompt_lens: DeviceArray
    bias_begins: DeviceArray
    bias_ends: DeviceArray
    bias_token_ids: DeviceArray
    bias_values: DeviceArray
    changes_logits: bool


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
def _candidate(rank, token):  # type: ignore[no-untyped-def]
    """A key whose maximum is the largest rank, and of those the lowest token."""
    return uint64((uint64(rank) << uint64(32)) | uint64(uint32(~token)))


@cuda.jit(device=True, inline="always")
def _best_of_row(best, logits, first, vocab, below):  # type: ignore[no-untyped-def]
    """best[0] = the largest candidate under ``below`` of the row; synchronises before and after."""
    thread = uint32(cuda.threadIdx.x)
    cuda.syncthreads()
    if thread == uint32(0):
        best[0] = uint64(0)
    cuda.syncthreads()
    mine = uint64(0)
    token = thread
    while token < vocab:
        candidate = _candidate(_ordered(logits[uint32(first + token)]), token)
        if candidate < below:
            mine = max(mine, candidate)
        token = uint32(token + uint32(THREADS))
    cuda.atomic.max(best, 0, mine)
    cuda.syncthreads()
    return best[0]


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


@cache
def sample_kernel() -> Kernel:
    def sample(  # type: ignore[no-untyped-def]
        token_ids, logits, temperatures, top_ks, top_ps, min_ps, seeds, output_indices, vocab
    ):
        histogram = cuda.shared.array(BINS, uint64)
        parts = cuda.shared.array(THREADS, uint64)
        groups = cuda.shared.array(32, uint64)
        state = cuda.shared.array(2, uint64)  # the threshold's bits so far, how much is still wanted
        best = cuda.shared.array(1, uint64)
        thread = uint32(cuda.threadIdx.x)
        row = uint32(cuda.blockIdx.x)
        first = uint32(row * vocab)
        top = _best_of_row(best, logits, first, vocab, uint64(0xFFFFFFFFFFFFFFFF))
        largest = _value_of(uint32(top >> uint64(32)))
        temperature = temperatures[row]
        is_finite = uint32(as_bits(largest) & uint32(0x7F800000)) != uint32(0x7F800000)
        if temperature == float32(0) or not is_finite:
            if thread == uint32(0):
                token_ids[row] = int32(~uint32(top))
            return

        floor = uint32(0)  # least kept, as _ordered
        top_k, top_p = uint32(top_ks[row]), top_ps[row]
        for stage in range(2):
            is_mass = stage == 1
            if (top_p < float32(1)) if is_mass else (top_k > uint32(0) and top_k < vocab):
                prefix, fixed = uint32(0), uint32(0)
                wanted = uint64(top_k)
                shift = uint32(21)
                for step in range(3):
                    digits = uint32(1023) if step == 2 else uint32(2047)
                    for i in range(BINS_PER_THREAD):
                        histogram[uint32(thread + uint32(i * THREADS))] = uint64(0)
                    cuda.syncthreads()
                    token = thread
                    while token < vocab:
                        logit = logits[uint32(first + token)]
                        ordered = _ordered(logit)
                        if ordered >= floor and uint32(ordered & fixed) == prefix:
                            mass = uint64(1)
                            if is_mass:
                                mass = to_fixed(float32(_probability(logit, largest, temperature) * float32(2.0**32)))
                            cuda.atomic.add(histogram, uint32(uint32(ordered >> shift) & digits), mass)
                        token = uint32(token + uint32(THREADS))
                    cuda.syncthreads()
                    # From the top: which bin takes the sum to what is wanted? Groups, then threads, then bins.
                    part = uint64(0)
                    for i in range(BINS_PER_THREAD):  # each thread begins elsewhere, against bank conflicts
                        turned = uint32((uint32(i) + (thread >> uint32(2))) & uint32(BINS_PER_THREAD - 1))
                        part += histogram[uint32(uint32(BINS - 1) - thread * uint32(BINS_PER_THREAD) - turned)]
                    parts[thread] = part
                    cuda.syncthreads()
                    if thread < uint32(32):
                        group = uint64(0)
                        for i in range(WARPS):
                            turned = uint32((uint32(i) + thread) & uint32(WARPS - 1))
                            group += parts[uint32(thread * uint32(WARPS) + turned)]
                        groups[thread] = group
                    cuda.syncthreads()
                    if thread == uint32(0):
                        if is_mass and step == 0:
                            total = uint64(0)
                            for i in range(32):
                                total += groups[i]
                            share = to_fixed(float32(top_p * float32(2.0**32)))
                            low = uint64(uint64(total & uint64(0xFFFFFFFF)) * share)
                            wanted = uint64(uint64(total >> uint64(32)) * share + (low >> uint64(32)))
                            if uint64(low & uint64(0xFFFFFFFF)) != uint64(0):
                                wanted = uint64(wanted + uint64(1))
                        place = uint32(0)
                        while place < uint32(31) and groups[place] < wanted:
                            wanted = uint64(wanted - groups[place])
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

        min_p = min_ps[row]
        seed = seeds[row]
        key0, key1 = uint32(seed), uint32(seed >> uint64(32))
        counter = output_indices[row]
        is_aligned = uint32(vocab & uint32(3)) == uint32(0)
        winner = uint64(0)
        token = uint32(thread * uint32(4))
        while token < vocab:
            if is_aligned:
                values = load_quad(logits, uint32(first + token))
            else:
                last = uint32(vocab - uint32(1))
                values = (
                    logits[uint32(first + token)],
                    logits[uint32(first + min(uint32(token + uint32(1)), last))],
                    logits[uint32(first + min(uint32(token + uint32(2)), last))],
                    logits[uint32(first + min(uint32(token + uint32(3)), last))],
                )
            bits = _philox(uint32(token >> uint32(2)), counter, key0, key1)
            for i in range(4):
                candidate = uint32(token + uint32(i))
                p = _probability(values[i], largest, temperature)
                if candidate < vocab and p >= min_p and _ordered(values[i]) >= floor:
                    winner = max(winner, _candidate(as_bits(divide(p, _exponential(bits[i]))), candidate))
            token = uint32(token + uint32(4 * THREADS))
        cuda.syncthreads()
        if thread == uint32(0):
            best[0] = uint64(0)
        cuda.syncthreads()
        cuda.atomic.max(best, 0, winner)
        cuda.syncthreads()
        if thread == uint32(0):
            token_ids[row] = int32(~uint32(best[0]))

    parameters = (float32[::1], int32[::1], float32[::1], float32[::1], uint64[::1], uint32[::1])
    return Kernel("sample", sample, (int32[::1], float32[::1], *parameters, uint32), THREADS)


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
        best = cuda.shared.array(1, uint64)
        warp_sums = cuda.shared.array(WARPS, float32)
        thread, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        first = uint32(row * vocab)
        below = uint64(0xFFFFFFFFFFFFFFFF)
        top = _best_of_row(best, logits, first, vocab, below)
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
            top = _best_of_row(best, logits, first, vocab, below)
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


@dataclass(frozen=True, slots=True)
class SampleScratch:
    """``counts`` uint32 [L, vocab] of zeros, left so; the others are as long as the history and the bias."""

    counts: DeviceArray
    raw_history: DeviceArray
    raw_bias: DeviceArray


def sample(device: Device, token_ids: DeviceArray, logits: DeviceArray, sampling: SamplingArrays) -> None:
    num_rows, vocab = logits.shape
    s = sampling
    parameters = [s.temperature, s.top_k, s.top_p, s.min_p, s.seed, s.output_index]
    device.launch(sample_kernel(), num_rows, [token_ids, flat(logits), *parameters, vocab])


def penalties(device: Device, logits: DeviceArray, sampling: SamplingArrays, scratch: SampleScratch) -> None:
    num_rows, vocab = logits.shape
    s = sampling
    arrays = [flat(logits), scratch.raw_history, scratch.raw_bias, flat(scratch.counts)]
    history = [s.history_begins, s.history_ends, s.history, s.history_prompt_lens]
    parameters = [s.repetition_penalty, s.presence_penalty, s.frequency_penalty]
    bias = [s.bias_begins, s.bias_ends, s.bias_token_ids, s.bias_values]
    device.launch(penalties_kernel(), num_rows, [*arrays, *history, *parameters, *bias, vocab])


def logprob_totals(
    device: Device, totals: DeviceArray, top_ids: DeviceArray, top_logprobs: DeviceArray, logits: DeviceArray
) -> None:
    """``top_ids`` and ``top_logprobs`` are [L, n]; n may be 0."""
    num_rows, vocab = logits.shape
    arrays = [totals, flat(top_ids), flat(top_logprobs), flat(logits)]
    device.launch(logprob_totals_kernel(), num_rows, [*arrays, vocab, top_ids.shape[1]])


def chosen_logprobs(
    device: Device,
    logprobs: DeviceArray,
    token_ids: DeviceArray,
    logits: DeviceArray,
    totals: DeviceArray,
    sampling: SamplingArrays,
    scratch: SampleScratch,
) -> None:
    num_rows, vocab = logits.shape
    s = sampling
    arrays = [logprobs, token_ids, flat(logits), totals, scratch.raw_history, scratch.raw_bias]
    lists = [s.history_begins, s.history_ends, s.history, s.bias_begins, s.bias_ends, s.bias_token_ids]
    device.launch(chosen_logprobs_kernel(), num_rows, [*arrays, *lists, vocab])
