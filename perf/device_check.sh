#!/usr/bin/env bash
# Everything that only a GPU can show, in under 8 minutes: the tests marked cuda, GB/s of every kernel beside the read
# bandwidth of the same run, and a model end to end. JSON goes to $OUT (perf/results by default).
#
#   perf/device_check.sh             on a machine with a GPU
#   perf/device_check.sh --dry-run   without one: compiles all for every GPU generation, runs the rest on the executor
#
# Needs Python 3.11 or newer ($PYTHON) with numba-cuda, cupy, numpy, pytest and the project's own dependencies (gguf,
# safetensors, tokenizers, jinja2, platformdirs, psutil, …). Wheels in the folder $WHEELS are installed first, without a
# network. What fails does not keep the rest from running; the exit code tells.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
OUT="${OUT:-perf/results}"
DRY_RUN="${1:-}"
failed=()
case "$DRY_RUN" in
"" | --dry-run) ;;
*) echo "usage: perf/device_check.sh [--dry-run]" >&2 && exit 2 ;;
esac

step() { # name, seconds at most, command…
    local name="$1" limit="$2" start=$SECONDS
    shift 2
    echo "== $name"
    if timeout "$limit" "$@"; then
        echo "== $name: passed in $((SECONDS - start)) s"
    else
        echo "== $name: FAILED ($?) after $((SECONDS - start)) s"
        failed+=("$name")
    fi
}

mkdir -p "$OUT"
if [[ -n "${WHEELS:-}" ]]; then
    step "carried wheels" 120 "$PYTHON" -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl
fi
# The project's pytest options want plugins that a bare machine lacks.
pytest=("$PYTHON" -m pytest -q -o addopts= -p no:cacheprovider tests/kernels/cuda)
export PYTHONPATH="$PWD:$PWD/clients/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

if [[ "$DRY_RUN" == "--dry-run" ]]; then
    step "cards" 600 "$PYTHON" -c 'from numba_engine.cli import cli; cli()' kernels
    step "kernels on the executor" 600 "${pytest[@]}" -m "not cuda"
    step "bench" 300 "$PYTHON" -m perf.bench_kernels --dry-run
    step "random model" 120 "$PYTHON" -m perf.random_model --dry-run
else
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || failed+=("nvidia-smi")
    step "kernels on the GPU" 240 "${pytest[@]}" -m cuda
    step "bench" 150 "$PYTHON" -m perf.bench_kernels --out "$OUT/kernels.json"
    step "8B end to end" 90 "$PYTHON" -m perf.random_model --out "$OUT/random_8b.json"
fi

if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "all passed"
