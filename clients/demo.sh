#!/usr/bin/env bash
# The whole journey on one screen: fetch a small model, serve it, stream a chat and a profile, stop. `make demo` runs it.
set -euo pipefail

say() {
  printf '\n\033[1m$'
  for word in "$@"; do
    case "$word" in *\ *) printf ' "%s"' "$word" ;; *) printf ' %s' "$word" ;; esac
  done
  printf '\033[0m\n'
}

run() {
  say "$@"
  "$@"
}

port="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
target="127.0.0.1:$port"
log="$(mktemp)"
server=""

stop_server() {
  status=$?
  trap - EXIT
  if [ -n "$server" ] && kill -TERM "$server" 2>/dev/null; then
    wait "$server" || true
  fi
  if [ "$status" -ne 0 ] && [ "$status" -ne 130 ]; then
    echo "The demo failed (exit status $status); the server's log:" >&2
    tail -n 40 "$log" >&2
  fi
  rm -f "$log"
  exit "$status"
}
trap stop_server EXIT
trap 'exit 130' INT TERM

run numba-engine fetch-demo

say numba-engine serve demo --port "$port" "&"
numba-engine serve demo --port "$port" >"$log" 2>&1 &
server=$!
until numba-engine-client wait --target "$target" --for 2 2>/dev/null; do
  # A server that cannot start has ended: its status is the demo's.
  kill -0 "$server" 2>/dev/null || { wait "$server"; exit 1; }
done

run numba-engine-client chat --target "$target" --message "Why is the sky blue?" --max-tokens 96 --temperature 0
run numba-engine-client profile --target "$target" --prompt "The capital of France is" --num-tokens 24
run numba-engine-client status --target "$target"
