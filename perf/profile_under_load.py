"""What a Profile costs the streams beside it: eight live streams of the demo model, with and without one.

    python -m perf.profile_under_load

A server in a process of its own, on one thread: those of a team would spin while other processes keep one from running.
Rounds of eight greedy streams by turns without a profile, with one that watches them (``live``), and with one that runs
two sequences of its own beside them (``synthetic``); the profile begins in the middle of a round and ends before it.

At each token of the first stream two clocks are read: the wall's, and how long the engine's thread has been on a CPU,
which other processes of the machine disturb less. The median time between tokens grows with the context; so the figure
is how much longer it is after the profile (or while it lasts) than before, against the same quotient at the same
positions without a profile. Every round must give the same tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from numba_engine.checkpoint.demo import fetch_demo
from numba_engine_client import AsyncClient, Client, Profiling
from perf import machine

NUM_STREAMS = 8
NUM_TOKENS = 144
ROUNDS = 8
PROFILE_AT = 48
"""Tokens of the first stream after which the profile begins."""
PROFILED_STEPS = 24
PROFILES: dict[str, Profiling] = {
    "live": {"live_steps": PROFILED_STEPS},
    "synthetic": {"synthetic": {"num_seqs": 2, "prompt_len": 64}, "num_tokens": PROFILED_STEPS},
}
FIRST_POSITION = 8
"""The steps before have other streams' prompts in them."""

When = Literal["before", "while", "after"]
"""The profile."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The clocks at one token of the first stream, in seconds."""

    position: int
    wall: float
    engine: float
    """On a CPU, of the server's busiest thread: the engine's."""


@dataclass(frozen=True, slots=True)
class Round:
    """What the clocks said, and when the profile began and ended by the wall's."""

    token_ids: list[list[int]]
    """Of each stream."""
    readings: list[Reading]
    """Of the tokens that came alone in their message."""
    window_s: tuple[float, float] | None

    def gaps_s(self, clock: str) -> Iterator[tuple[int, float, When]]:
        """(position, time since the token before, and when that was; without a profile all is before)"""
        for last, now in itertools.pairwise(self.readings):
            if now.position != last.position + 1 or last.position < FIRST_POSITION:
                continue
            gap_s = getattr(now, clock) - getattr(last, clock)
            if self.window_s is None or now.wall <= self.window_s[0]:
                yield last.position, gap_s, "before"
            else:
                yield last.position, gap_s, "after" if last.wall >= self.window_s[1] else "while"


@contextmanager
def serving(model: Path) -> Iterator[tuple[str, int]]:
    """The address and process id of a server. Its log goes where ours does: an unread pipe would stop it when full."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "service", "serve", str(model), "--port", address.rpartition(":")[2]]
    with subprocess.Popen([*command, "--threads", "1", "--no-prefix-caching", "--log-level", "error"]) as process:
        try:
            yield address, process.pid
        finally:
            process.terminate()


def busiest_thread_s(pid: int) -> float:
    """How long the thread of the process that was on a CPU longest was there."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return max(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def run_round(address: str, pid: int, profiling: Profiling | None) -> Round:
    async with AsyncClient(address, timeout=300) as client:
        token_ids: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        readings: list[Reading] = []
        is_under_way = asyncio.Event()

        async def stream(index: int) -> None:
            prompt = f"Stream {index}. Once upon a time there was a"
            async for delta in client.generate(prompt, temperature=0, ignore_eos=True, max_tokens=NUM_TOKENS):
                token_ids[index] += delta.token_ids
                if index == 0 and len(delta.token_ids) == 1:
                    readings.append(Reading(len(token_ids[0]), time.perf_counter(), busiest_thread_s(pid)))
                if len(token_ids[0]) >= PROFILE_AT:
                    is_under_way.set()

        async def profile() -> tuple[float, float] | None:
            if profiling is None:
                return None
            await is_under_way.wait()
            start_s = time.perf_counter()
            async for _ in client.profile(**profiling):
                pass
            return start_s, time.perf_counter()

        *_, window_s = await asyncio.gather(*map(stream, range(NUM_STREAMS)), profile())
        return Round(token_ids, readings, window_s)


def slowdown(plain: Sequence[Round], profiled: Sequence[Round], clock: str, when: When) -> float:
    """How much longer tokens take then than before the profile, against the same positions without one, minus 1."""
    without = [(position, gap_s) for each in plain for position, gap_s, _ in each.gaps_s(clock)]

    def quotient(when: When) -> float:
        with_it = [(position, gap_s) for each in profiled for position, gap_s, was in each.gaps_s(clock) if was == when]
        positions = {position for position, _ in with_it}
        return median(gap_s for _, gap_s in with_it) / median(g for position, g in without if position in positions)

    return quotient(when) / quotient("before") - 1


def noise(plain: Sequence[Round], again: Sequence[Round], clock: str) -> float:
    """The same figure between rounds without a profile, before and after its place: what the others are worth."""

    def growth(rounds: Sequence[Round]) -> float:
        gaps = [(position, gap_s) for each in rounds for position, gap_s, _ in each.gaps_s(clock)]
        before = median(gap_s for position, gap_s in gaps if position < PROFILE_AT)
        return median(gap_s for position, gap_s in gaps if position >= PROFILE_AT + PROFILED_STEPS) / before

    return growth(again) / growth(plain) - 1


def measure(address: str, pid: int) -> dict[str, Any]:
    def run(profiling: Profiling | None = None) -> Round:
        return asyncio.run(run_round(address, pid, profiling))

    tokens = run().token_ids  # warms up
    plain: list[Round] = []
    again: list[Round] = []
    profiled: dict[str, list[Round]] = {name: [] for name in PROFILES}
    for _ in range(ROUNDS):
        plain.append(run())
        profiled["live"].append(run(PROFILES["live"]))
        again.append(run())
        profiled["synthetic"].append(run(PROFILES["synthetic"]))
    everyone = [*plain, *again, *(each for rounds in profiled.values() for each in rounds)]

    def by(clock: str) -> dict[str, Any]:
        return {
            "median_ms_between_tokens": 1e3 * median(gap_s for each in plain for _, gap_s, _ in each.gaps_s(clock)),
            "slowdown_without_a_profile": noise(plain, again, clock),
            "slowdown": {
                name: {
                    "after_the_profiled_steps": slowdown([*plain, *again], rounds, clock, "after"),
                    "within_the_profiled_steps": slowdown([*plain, *again], rounds, clock, "while"),
                }
                for name, rounds in profiled.items()
            },
        }

    return {
        "num_streams": NUM_STREAMS,
        "num_tokens": NUM_TOKENS,
        "num_threads": 1,
        "profiled_steps": PROFILED_STEPS,
        "rounds": ROUNDS,
        "tokens_are_equal": all(each.token_ids == tokens for each in everyone),
        "by_clock": {"engine_thread_on_cpu": by("engine"), "wall": by("wall")},
    }


def main() -> None:
    with serving(fetch_demo()) as (address, pid):
        with Client(address) as client:
            client.wait_ready(300)
        result = machine.describe() | measure(address, pid) | {"load_average_after": os.getloadavg()[0]}
    file = Path(__file__).parent / "results" / "profile_under_load.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"tokens equal: {result['tokens_are_equal']}")
    for clock, by in result["by_clock"].items():
        print(f"{clock}: without a profile {by['slowdown_without_a_profile']:+.1%}")
        for name, slowdowns in by["slowdown"].items():
            print(" ", name, *(f"{where.replace('_', ' ')} {value:+.1%}" for where, value in slowdowns.items()))
    print(file)


if __name__ == "__main__":
    main()
