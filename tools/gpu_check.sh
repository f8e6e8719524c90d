#!/usr/bin/env bash
# GPU tests and benchmarks on a bare machine: Python 3.12 with torch 2.11, transformers, pytest.
#
#   tools/gpu_check.sh [WHEELS [FILE ...]]   run the tests (tests/gpu/test_*.py), in at most ten minutes
#   tools/gpu_bench.sh OUT PART [WHEELS]     run one part of the benchmarks; results are JSON in the folder OUT
#
# It installs nothing. Missing packages (megatron-core, msgspec, pyzmq ...) are read from the wheels in the
# folder WHEELS, unpacked into a temporary folder on PYTHONPATH. To fetch them on a machine with a registry:
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#     --platform manylinux2014_x86_64 -d WHEELS megatron-core==0.16.1 msgspec pyzmq pytest-timeout
set -euo pipefail
wheels=${1:+$(realpath -m "$1")}
cd "$(dirname "$0")/.."
source tools/gpu_env.sh "$wheels"
"$python" - <<'END'
import importlib.util, sys
import torch
print("python", sys.version.split()[0], "torch", torch.__version__, "cuda", torch.version.cuda)
print("device", torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
for name in ("transformers", "megatron.core", "vllm", "pynvml", "msgspec", "zmq"):
    try:
        print(name, "found" if importlib.util.find_spec(name) else "MISSING: its tests are skipped")
    except ModuleNotFoundError:
        print(name, "MISSING: its tests are skipped")
END
# One process per file: a process that has used the GPU would disturb the memory checks of the next file.
# Warnings of other library versions are not errors here.
failed=0
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- tests/gpu/test_*.py
for file in "$@"; do
  left=$((580 - SECONDS))
  if [ "$left" -lt 20 ]; then
    echo "--- $file: left out, no time; run tools/gpu_check.sh WHEELS $file"
    failed=1
    continue
  fi
  echo "--- $file"
  timeout --foreground -k 5 "$left" "$python" -m pytest "$file" -m gpu -q -rs -W default -p no:cacheprovider || failed=1
done
exit $failed
