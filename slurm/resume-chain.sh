#!/bin/bash
# Submits a run as a chain of jobs. Each job waits until the job before it has ended, with any result. For
# clusters that do not requeue, or with a short time limit.
#
#   slurm/resume-chain.sh LINKS SCRIPT RUN [sbatch options]
#   slurm/resume-chain.sh 5 slurm/train.sbatch runs/a --partition=gpu
#
# Each job continues from the last checkpoint. After the run is finished, the remaining jobs end at once. To end
# the chain early, use `scancel` with the printed ids. `--dependency=singleton` does not work: the components of
# one heterogeneous job have the same name and would wait for each other.
set -euo pipefail
[[ $# -ge 3 && $1 =~ ^[1-9][0-9]*$ ]] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
links=$1 script=$2 run=$3
shift 3

# The name by which `yatt status` and `yatt resume` know the run's job while it waits.
name=$(sed -n 's/.*"by_hand": *"\([^"]*\)".*/\1/p' "$run/slurm.json" 2>/dev/null || true)
named=(${name:+"--job-name=$name"})

previous=""
for _ in $(seq "$links"); do
  after=(${previous:+"--dependency=afterany:$previous"})
  previous=$(sbatch --parsable ${named[@]+"${named[@]}"} ${after[@]+"${after[@]}"} "$@" "$script" "$run")
  previous=${previous%%;*}  # the output is "id;cluster" if there are several clusters
  echo "$previous"
done
