#!/bin/sh
# Generates the Python code of the API into the client package, whose only copy it is.
#
#   proto/generate.sh [OUTPUT_DIR]        default: clients/python
#
# Uses the Python of $PYTHON (default: python3). The generator is pinned and lives in a folder of its own, build/proto-tools,
# because generated code runs only with protobuf and grpcio at least as new as what wrote it: this one writes for
# protobuf >= 6.31.1 and grpcio >= 1.76, so the client can be installed beside packages that need protobuf 6 or 7.
set -eu

GRPCIO_TOOLS_VERSION=1.76.0

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
out=${1:-"$root/clients/python"}
python=${PYTHON:-python3}
tools="$root/build/proto-tools/$GRPCIO_TOOLS_VERSION-$("$python" -c 'import sys; print(sys.implementation.cache_tag)')"

if [ ! -e "$tools/complete" ]; then
  rm -rf "$tools"
  # The compiler in the wheel stands alone: without its dependencies.
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$tools" \
    "grpcio-tools==$GRPCIO_TOOLS_VERSION"
  touch "$tools/complete"
fi

mkdir -p "$out"
PYTHONPATH="$tools" "$python" -m grpc_tools.protoc -I "$root/proto" \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  numba_engine_api/v1/inference.proto
