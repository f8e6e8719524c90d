#!/usr/bin/env bash
# One part of the benchmarks of a GPU, in at most ten minutes. Rows are in OUT/*.json as soon as they are measured;
# the same call again continues with the cases that were left out for time or failed. See tools/gpu_check.sh for
# WHEELS. MORE is passed on (--toy: smallest sizes, on any device; --only CASE ...).
#
#   tools/gpu_bench.sh OUT PART [WHEELS] [MORE ...]
#
# Parts, most valuable first:
#   preflight   facts of the machine, the driver and the libraries; needs no vLLM
#   parity      the trainer against transformers, in float32 and bfloat16
#   engine      vLLM by yatt against plain vLLM; sleep, wake, updates of weights
#   kill        a colocated run whose engine is killed
#   trainer     tokens a second, MFU and peak memory, beside a plain loop
#   judge       a colocated run with a GenRM
#   resume      equality to the bit after all processes were killed
#   trl         a whole step beside TRL
#   trace       a profiler's trace of one optimizer step
set -uo pipefail
declare -A modules=(
  [preflight]=preflight [parity]=parity [engine]=bench_engine [trainer]=bench_trainer [trl]=bench_trl [trace]=trace
  [kill]="colocated --only kill" [judge]="colocated --only judge" [resume]="colocated --only resume"
)
if [ $# -lt 2 ] || [ -z "${modules[$2]:-}" ]; then
  echo "usage: tools/gpu_bench.sh OUT PART [WHEELS] [MORE ...]; parts: ${!modules[*]}" >&2
  exit 2
fi
out=$(realpath -m "$1") part=$2 wheels=
shift 2
if [ $# -gt 0 ] && [[ $1 != --* ]]; then wheels=$(realpath -m "$1"); shift; fi
mkdir -p "$out" || exit 2
cd "$(dirname "$0")/.."
source tools/gpu_env.sh "$wheels"
# The benchmark ends by itself; the limit is for one that does not. To unpack wheels has taken some of the time. In
# the foreground: signals of a terminal, and of whoever ends this script with its process group, reach the benchmark,
# which ends the case that runs.
# shellcheck disable=SC2086
timeout --foreground -k 15 $((585 - SECONDS)) "$python" -W ignore -m tests.gpu.${modules[$part]} --out "$out" \
  --call-s $((540 - SECONDS)) "$@"
