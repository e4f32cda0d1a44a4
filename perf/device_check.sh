#!/usr/bin/env bash
# Everything that only a GPU can show, in under 8 minutes: the tests marked cuda, tokens a second of 8B and 1B models,
# GB/s of every op beside a plain read and cuBLAS, and PyTorch on the same shapes. JSON goes to $OUT (perf/results by
# default), whole after every result, so that a step that runs out of time loses little.
#
#   perf/device_check.sh             on a machine with a GPU
#   perf/device_check.sh --dry-run   without one: the same scripts at tiny shapes on the executor
#
# Needs Python 3.11 or newer ($PYTHON) with numba-cuda, cupy, numpy, pytest and the project's own dependencies (gguf,
# safetensors, tokenizers, jinja2, platformdirs, psutil, …); PyTorch and transformers are compared with where they are
# installed. Wheels in the folder $WHEELS are installed first, without a network. Kernels are compiled to PTX once and
# kept in $XDG_CACHE_HOME/numba-engine: fill a folder with them before (numba-engine kernels) and take it along, or
# compiling is what the minutes go to. What fails does not keep the rest from running; the exit code tells.
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
    step "carried wheels" 60 "$PYTHON" -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl
fi
# The project's pytest options want plugins that a bare machine lacks.
pytest=("$PYTHON" -m pytest -q -o addopts= -p no:cacheprovider tests/kernels/cuda -m cuda)
export PYTHONPATH="$PWD:$PWD/clients/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

if [[ "$DRY_RUN" == "--dry-run" ]]; then
    kept="$(mktemp -d)"
    trap 'rm -rf "$kept"' EXIT
    step "decode" 120 "$PYTHON" -m perf.bench_decode --dry-run --out "$kept/decode.json"
    step "ops" 210 "$PYTHON" -m perf.bench_ops --dry-run --out "$kept/ops.json"
    step "PyTorch" 90 "$PYTHON" -m perf.compare_torch --dry-run --out "$kept/torch.json"
    step "tests for the GPU can be collected" 60 "${pytest[@]}" --collect-only
else
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv || failed+=("nvidia-smi")
    step "kernels on the GPU" 100 "${pytest[@]}"
    step "decode 8B" 100 "$PYTHON" -m perf.bench_decode --model 8b --minutes 1.4 --out "$OUT/decode_8b.json"
    step "ops" 90 "$PYTHON" -m perf.bench_ops --minutes 1.2 --out "$OUT/ops.json"
    step "PyTorch" 90 "$PYTHON" -m perf.compare_torch --minutes 1.2 --out "$OUT/compare_torch.json"
    step "decode 1B" 60 "$PYTHON" -m perf.bench_decode --model 1b --minutes 0.8 --out "$OUT/decode_1b.json"
fi

if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "all passed"
