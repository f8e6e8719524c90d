#!/usr/bin/env bash
# Benchmarks of a GPU, as JSON in the folder OUT; each script takes some minutes. See tools/gpu_check.sh for
# WHEELS. MORE is passed to every script (--toy: smallest sizes, on any device).
#
#   tools/gpu_bench.sh OUT [WHEELS] [MORE ...]
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "$1")
wheels=${2:-/nonexistent}
shift 2 2>/dev/null || shift 1
source tools/gpu_env.sh "$wheels"
failed=0
for script in parity bench_trainer bench_engine colocated trace; do
  echo "--- $script"
  timeout 580 "$python" -W ignore -m "tests.gpu.$script" --out "$out" "$@" || { echo "$script failed: $?"; failed=1; }
done
exit $failed
