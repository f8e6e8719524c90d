#!/bin/bash
# Submits a run as a chain of jobs, each waiting for the end of the one before, whatever that end was: for
# clusters that do not requeue, or whose time limit is short.
#
#   slurm/resume-chain.sh LINKS SCRIPT RUN [sbatch options]
#   slurm/resume-chain.sh 5 slurm/train.sbatch runs/a --partition=gpu
#
# A link goes on from the last checkpoint. Once the run is finished the links that are left end at once; `scancel`
# with the ids that are printed ends the chain by hand. Not `--dependency=singleton`: the components of one
# heterogeneous job have the same name and would wait for each other.
set -euo pipefail
[[ $# -ge 3 && $1 =~ ^[1-9][0-9]*$ ]] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
links=$1 script=$2 run=$3
shift 3

previous=""
for _ in $(seq "$links"); do
  after=(${previous:+"--dependency=afterany:$previous"})
  previous=$(sbatch --parsable ${after[@]+"${after[@]}"} "$@" "$script" "$run")
  previous=${previous%%;*}  # "id;cluster" where there are several
  echo "$previous"
done
