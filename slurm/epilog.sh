#!/bin/bash
# For administrators: an Epilog that removes files that a killed run may leave in a node's memory and scratch
# folder, and drains the node if a process still uses a GPU. Slurm runs it as root on each node of a job that
# ended; a non-zero exit code drains the node.
#
#   Epilog=/etc/slurm/yatt-epilog.sh               in slurm.conf
#
# It removes folders named yatt-UID-* that belong to the job's user, only if that user has no other job on the
# node and squeue confirms it. It kills no process, because Slurm does that.
set -uo pipefail
PATH=${PATH:-}:/usr/local/bin:/usr/bin:/bin  # Slurm sets a short PATH for an epilog
uid=${SLURM_JOB_UID:?set by Slurm} job=${SLURM_JOB_ID:?set by Slurm}
node=${SLURMD_NODENAME:-$(hostname -s)}
read -ra folders <<<"${YATT_FOLDERS:-/dev/shm /tmp}"

jobs=$(timeout 20 squeue -h -u "$uid" -w "$node" -o %A) || exit 0  # no answer: remove nothing
if grep -vqx -e "$job" -e "" <<<"$jobs"; then exit 0; fi
find "${folders[@]}" -mindepth 1 -maxdepth 1 -type d -uid "$uid" -name "yatt-$uid-*" -exec rm -rf {} + 2>/dev/null

command -v nvidia-smi >/dev/null || exit 0
left=()
for pid in $(timeout 20 nvidia-smi --query-compute-apps=pid --format=csv,noheader 2>/dev/null); do
  if [[ $(stat -c %u "/proc/$pid" 2>/dev/null) = "$uid" ]]; then left+=("$pid"); fi
done
if [[ ${#left[@]} -gt 0 ]]; then
  logger -t yatt-epilog "job $job: still on a GPU of $node: ${left[*]}" 2>/dev/null
  exit 1
fi
exit 0
