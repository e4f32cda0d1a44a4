"""How long a first token takes from the shell: with no compiled kernels kept (cold), and with them (warm).

    python -m perf.start_times

Runs ``numba-engine generate`` as a user would, in processes of its own with a cache folder of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from numba_engine.checkpoint.demo import fetch_demo
from perf import machine

WARM_RUNS = 5


def start_s(model: Path, cache: str) -> float:
    command = [
        sys.executable,
        "-m",
        "service",
        "generate",
        str(model),
        "--prompt",
        "Hello",
        "--max-tokens",
        "1",
        "--quiet",
    ]
    start = time.perf_counter()
    subprocess.run(command, env=os.environ | {"XDG_CACHE_HOME": cache}, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    model = fetch_demo()
    with tempfile.TemporaryDirectory() as cache:
        cold_s = start_s(model, cache)
        warm_s = [start_s(model, cache) for _ in range(WARM_RUNS)]
    result = machine.describe() | {"cold_s": cold_s, "warm_median_s": median(warm_s), "warm_s": warm_s}
    file = Path(__file__).parent / "results" / "start_times.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"cold {cold_s:.1f} s, warm {median(warm_s):.2f} s (median of {WARM_RUNS}); {file}")


if __name__ == "__main__":
    main()
