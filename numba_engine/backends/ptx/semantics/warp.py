"""Lanes of a warp exchanging values, and the value side of barriers. The waiting is in ``control``."""

from __future__ import annotations

import numpy as np
from numba import njit

from numba_engine.backends.ptx.control import warp_bits
from numba_engine.backends.ptx.lanes import Mask
from numba_engine.backends.ptx.machine import Machine
from numba_engine.backends.ptx.parser import Instruction, both_results
from numba_engine.backends.ptx.registry import Op, opcode
from numba_engine.backends.ptx.semantics.load_store import BOTH

_LANE = np.arange(32, dtype=np.int32)


def by_warp(machine: Machine, array: np.ndarray) -> np.ndarray:
    """[warps, 32] copy or view of an array of any shape."""
    return np.broadcast_to(array, machine.shape).reshape(-1, 32)


@opcode("shfl")
def _shfl(machine: Machine, at: Instruction) -> Op:
    mode = at.parts[2]
    target, in_range = both_results(at.operands[0])
    value = machine.src(at.operands[1], "u32")
    by = machine.src(at.operands[2], "s32")
    clamp = machine.src(at.operands[3], "s32")
    put = machine.write(machine.dst(target, "u32"))
    put_predicate = machine.write(machine.dst(in_range, "pred")) if in_range is not None else None
    known = (by.size == 1 and clamp.size == 1) or None
    cache: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    taken = machine.scratch(1, BOTH, np.uint32).reshape(-1, 32)

    def sources() -> tuple[np.ndarray, np.ndarray]:
        """Lane to read from, and whether it lies within the segment."""
        if known:
            key = (int(by[0, 0]), int(clamp[0, 0]))
            if key not in cache:
                cache[key] = source_lanes(mode, np.array(key[0] & 31, np.int32), np.array(key[1], np.int32))
            return cache[key]
        return source_lanes(mode, by_warp(machine, by) & 31, by_warp(machine, clamp))

    def shuffle(mask: Mask) -> None:
        lane, inside = sources()
        values = by_warp(machine, value)
        active = mask.array.reshape(-1, 32)
        lane = np.atleast_2d(lane)
        bad = _read_lanes(values, lane, active, taken)
        if bad >= 0:
            source = int(lane[bad // 32 % lane.shape[0], bad % 32])
            raise machine.fault(
                at, "divergent-warp", f"shuffle reads lane {source} of its warp, which does not execute it", bad
            )
        put(mask, taken.reshape(machine.shape))
        if put_predicate is not None:
            put_predicate(mask, np.broadcast_to(inside, active.shape).reshape(machine.shape))

    return shuffle


@njit(cache=True, nogil=True)
def _read_lanes(values, lanes, active, out):  # type: ignore[no-untyped-def]
    """out[w, l] = values[w, lanes[w or 0, l]]; the first executing lane whose source does not execute, or -1."""
    bad = -1
    for warp in range(values.shape[0]):
        row = warp if lanes.shape[0] > 1 else 0
        for lane in range(32):
            source = lanes[row, lane]
            out[warp, lane] = values[warp, source]
            if bad < 0 and active[warp, lane] and not active[warp, source]:
                bad = 32 * warp + lane
    return bad


def source_lanes(mode: str, by: np.ndarray, clamp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(source lane, in range) per lane, as the ISA computes them from the packed clamp and segment mask."""
    bound = clamp & 31
    segment = (clamp >> 8) & 31
    highest = (_LANE & segment) | (bound & ~segment)
    lowest = _LANE & segment
    if mode == "up":
        lane = _LANE - by
        inside = lane >= highest
    elif mode == "down":
        lane = _LANE + by
        inside = lane <= highest
    elif mode == "bfly":
        lane = _LANE ^ by
        inside = lane <= highest
    else:
        lane = lowest | (by & ~segment)
        inside = lane <= highest
    return np.where(inside, lane, _LANE), inside


@opcode("vote")
def _vote(machine: Machine, at: Instruction) -> Op:
    mode = at.parts[2]
    predicate, negated = machine.predicate(at.operands[1])
    put = machine.write(machine.dst(at.operands[0], "b32" if mode == "ballot" else "pred"))

    def vote(mask: Mask) -> None:
        members = warp_bits(mask.array)
        said = warp_bits(mask.narrow(predicate, negated).array)
        results = {"ballot": said, "any": said != 0, "all": said == members, "uni": (said == members) | (said == 0)}
        put(mask, _per_lane(machine, results[mode]))

    return vote


@opcode("activemask")
def _activemask(machine: Machine, at: Instruction) -> Op:
    put = machine.write(machine.dst(at.operands[0], "b32"))
    return lambda mask: put(mask, _per_lane(machine, warp_bits(mask.array)))


def _per_lane(machine: Machine, per_warp: np.ndarray) -> np.ndarray:
    return np.repeat(per_warp, 32).reshape(machine.shape)


@opcode("match")
def _match(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]
    target, all_equal = both_results(at.operands[0])
    value = machine.src(at.operands[1], kind)
    put = machine.write(machine.dst(target, "b32"))
    put_predicate = machine.write(machine.dst(all_equal, "pred")) if all_equal is not None else None

    def match(mask: Mask) -> None:
        values = by_warp(machine, value)
        active = mask.array.reshape(-1, 32)
        same = (values[:, :, None] == values[:, None, :]) & active[:, None, :]
        bits = np.packbits(same, axis=2, bitorder="little").view(np.uint32)[..., 0]
        if at.parts[1] == "all":
            members = warp_bits(mask.array)[:, None]
            agreed = bits == members
            bits = np.where(agreed, members, np.uint32(0))
            if put_predicate is not None:
                put_predicate(mask, agreed.reshape(machine.shape))
        put(mask, bits.reshape(machine.shape))

    return match


@opcode("redux")
def _redux(machine: Machine, at: Instruction) -> Op:
    operation, kind = at.parts[2], at.parts[-1]
    value = machine.src(at.operands[1], kind)
    put = machine.write(machine.dst(at.operands[0], kind))
    functions = {
        "add": (np.add, 0),
        "min": (np.minimum, np.iinfo(value.dtype).max),
        "max": (np.maximum, np.iinfo(value.dtype).min),
        "and": (np.bitwise_and, np.iinfo(value.dtype).max if kind[0] != "s" else -1),
        "or": (np.bitwise_or, 0),
        "xor": (np.bitwise_xor, 0),
    }
    function, neutral = functions[operation]

    def reduce(mask: Mask) -> None:
        active = mask.array.reshape(-1, 32)
        values = np.where(active, by_warp(machine, value), value.dtype.type(neutral))
        put(mask, _per_lane(machine, function.reduce(values, axis=1, dtype=value.dtype)))

    return reduce


@opcode("elect")
def _elect(machine: Machine, at: Instruction) -> Op:
    """The lowest member is the leader."""
    target, is_leader = both_results(at.operands[0])
    put = machine.write(machine.dst(target, "b32"))
    put_leader = machine.write(machine.dst(is_leader, "pred")) if is_leader is not None else None

    def elect(mask: Mask) -> None:
        leader = mask.array.reshape(-1, 32).argmax(axis=1).astype(np.uint32)
        put(mask, _per_lane(machine, leader))
        if put_leader is not None:
            put_leader(mask, (_LANE.astype(np.uint32) == leader[:, None]).reshape(machine.shape))

    return elect


@opcode("bar", "barrier")
def _bar(machine: Machine, at: Instruction) -> Op | None:
    if "arrive" in at.parts:
        number = machine.src(at.operands[0], "u32")

        def arrive(mask: Mask) -> None:
            count = np.count_nonzero(mask.array, axis=1)
            key = int(number.flat[0])
            machine.arrivals[key] = machine.arrivals.get(key, 0) + count

        return arrive
    if "red" not in at.parts:
        return None
    operation = at.parts[at.parts.index("red") + 1]
    target = at.operands[0]
    predicate, negated = machine.predicate(at.operands[-1])
    put = machine.write(machine.dst(target, "pred" if operation != "popc" else "u32"))

    def reduce(mask: Mask) -> None:
        said = mask.narrow(predicate, negated).array
        counts = np.count_nonzero(said, axis=1, keepdims=True)
        members = np.count_nonzero(mask.array, axis=1, keepdims=True)
        result = {"popc": counts, "and": counts == members, "or": counts > 0}[operation]
        put(mask, np.broadcast_to(result, machine.shape))

    return reduce
