"""What the performance model predicts for steps of whole models on GPUs that are not here, as JSON.

python -m perf.predict_kernels [--out perf/results/kernel_model_predicted.json]

Counts of launches, bytes and instructions are of this commit's kernels, compiled for compute capability 9.0 and run on
the PTX executor (a sample of each launch's blocks, scaled up). Times are predicted and not measured anywhere
(``numba_engine/kernel_lab/kernel_model.py`` says how); ``perf/bench_decode.py`` measures the same steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from numba_engine.formats import BF16, Q4_0, Q4_1, Q8_0
from numba_engine.kernel_lab.decode_step import ModelStep, observe_decode, observe_prefill
from numba_engine.kernel_lab.kernel_model import MODELLED_GPUS
from numba_engine.kernel_lab.observed_model import MODELS
from numba_engine.kernel_lab.step_tables import step_name, step_record
from perf.machine import describe

FORMATS = (BF16, Q8_0, Q4_0, Q4_1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("perf/results/kernel_model_predicted.json"))
    options = parser.parse_args()
    gpus = list(MODELLED_GPUS.values())
    facts = describe() | {
        "predicted": "times and shares are of the performance model; nothing here was measured on a GPU",
        "gpus": {
            gpu.gpu.key: {
                "name": gpu.gpu.name,
                "bandwidth_gbps": gpu.gpu.bandwidth_gbps,
                "multiprocessors": gpu.multiprocessors,
                "clock_hz": gpu.clock_hz,
                "bytes_in_flight_needed_per_multiprocessor": gpu.needed_in_flight,
            }
            for gpu in gpus
        },
    }
    records = []
    for step in _steps():
        record = step_record(step, gpus)
        for gpu in gpus[1:]:  # launch by launch for the first GPU only: numba-engine kernels --json has all
            del record["predicted"][gpu.gpu.key]["launches"]
        records.append(record)
        predicted = ", ".join(f"{gpu.gpu.key} {step.tokens_per_s(gpu):.0f} tok/s" for gpu in gpus)
        print(f"{step_name(step)}: {step.num_launches} launches, {step.moved_over_once:.4f} × the bytes; {predicted}")
        options.out.write_text(json.dumps(facts | {"steps": records}, indent=1) + "\n")


def _steps() -> Iterator[ModelStep]:
    for model, format in product(MODELS, FORMATS):
        yield observe_decode(model, format, (9, 0), context=128)
    for model, format in product(MODELS, (BF16, Q4_0)):
        yield observe_decode(model, format, (9, 0), num_seqs=8, context=128)
    for model in MODELS:
        yield observe_decode(model, BF16, (9, 0), context=8192)
        yield observe_prefill(model, BF16, (9, 0), num_tokens=512)


if __name__ == "__main__":
    main()
