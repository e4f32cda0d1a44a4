"""What looking costs: decode steps with and without a profile, turn by turn in one run, and the op times between them.

    python -m perf.profile_overhead [--threads 2] [--tokens 400]

Each profiled step is put beside the unprofiled one that follows it, so that whatever else the machine does meanwhile
weighs on both; the medians of those pairs are the result.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from numba_engine import LLM, EngineConfig, SamplingParams
from numba_engine.checkpoint.demo import fetch_demo
from numba_engine.profiling import ProfileSession
from numba_engine.profiling.report import StepProfile
from perf import machine

PROMPT = list(range(100, 132))


def decode_steps(session: ProfileSession, num_tokens: int, *, fusion: bool) -> list[StepProfile]:
    """Every other one profiled."""
    session.start(fusion=fusion, unprofiled_every=2)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with session.running([session.llm.validate(PROMPT, params)]) as steps:
        profiles = [step.profile for step in steps]
    session.stop()
    return [profile for profile in profiles if profile is not None and profile.is_decode_of(1)]


def compare(steps: list[StepProfile]) -> dict[str, Any]:
    pairs = [(a, b) for a, b in itertools.pairwise(steps) if a.profiled and not b.profiled]
    profiled = [a for a, _ in pairs]
    return {
        "num_pairs": len(pairs),
        "unprofiled_step_s": median(b.time_s for _, b in pairs),
        "profiled_step_s": median(a.time_s for a in profiled),
        "ops_s": median(a.ops_time_s for a in profiled),
        "host_s": median(a.host_time_s for a in profiled),
        "between_ops_s": median(a.launch_gap_s for a in profiled),
        "calibrated_overhead_s": median(a.overhead_s for a in profiled),
        "profiled_over_unprofiled": spread([a.time_s / b.time_s for a, b in pairs]),
        "ops_over_unprofiled": spread([a.ops_time_s / b.time_s for a, b in pairs]),
        "net_over_unprofiled": spread([a.net_time_s / b.time_s for a, b in pairs]),
    }


def spread(ratios: list[float]) -> dict[str, float]:
    first, middle, last = quantiles(ratios, n=4)
    return {"median": middle, "first_quartile": first, "last_quartile": last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--no-write", action="store_true", help="Print only.")
    options = parser.parse_args()

    config = EngineConfig(backend="cpu", num_threads=options.threads, max_num_seqs=1, max_model_len=1024)
    llm = LLM(str(fetch_demo()), config)
    llm.warm_up()
    session = ProfileSession(llm)
    result: dict[str, Any] = machine.describe() | {"threads": options.threads, "model": llm.model_info.name}
    for name, fusion in (("fused", True), ("textbook", False)):
        result[name] = compare(decode_steps(session, options.tokens, fusion=fusion))
        said = {key: result[name][key]["median"] for key in result[name] if key.endswith("unprofiled")}
        print(name, json.dumps({key: round(value, 3) for key, value in said.items()}), json.dumps(result[name]))
    if not options.no_write:
        file = Path(__file__).parent / "results" / "profile_overhead.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
