# Functions that find and end the processes of the cluster in $ROOT. Sourced by the scripts beside it.
export PATH="$PATH:/usr/sbin:/sbin"  # Debian installs daemons there
export SLURM_CONF="$ROOT/etc/slurm.conf"
# Folder of another Slurm than this machine's, made by tools/other_slurm.py.
OTHER=$(cat "$ROOT/etc/other" 2>/dev/null || true)
[[ -z $OTHER ]] || export PATH="$OTHER/bin:$PATH"

# alive PID: true if it runs. Zombies do not count: a PID 1 that does not reap leaves dead daemons as zombies.
alive() {
  local state
  state=$(sed -n 's/^State:[[:space:]]*//p' "/proc/$1/status" 2>/dev/null) || return 1
  [[ -n $state && $state != Z* ]]
}

# pid_of DAEMON: the pid in its pid file, if that process is alive and belongs to this cluster.
pid_of() {
  local pid
  pid=$(cat "$ROOT/run/$1.pid" 2>/dev/null) || return 1
  [[ -n $pid ]] && alive "$pid" && tr '\0' ' ' <"/proc/$pid/cmdline" | grep -qF "$ROOT/" && echo "$pid"
}

# signal NAME PIDS...: send the signal; ignore processes that have ended.
signal() {
  local name=$1 pid
  shift
  for pid in "$@"; do kill -s "$name" "$pid" 2>/dev/null || true; done
}

# gone SECONDS PIDS...: wait until all have ended; false after the time limit.
gone() {
  local tries=$(($1 * 20)) pid left
  shift
  while :; do
    left=0
    for pid in "$@"; do if alive "$pid"; then left=1; fi; done
    [[ $left = 0 ]] && return 0
    [[ $((tries--)) -gt 0 ]] || return 1
    sleep 0.05
  done
}

# end PIDS...: send TERM, then KILL.
end() {
  [[ $# -gt 0 ]] || return 0
  signal TERM "$@"
  gone 8 "$@" && return 0
  signal KILL "$@"
  gone 5 "$@" || echo "still there after SIGKILL: $*" >&2
}

# tasks [NODE]: pids of this cluster's job processes, on one node or on all. Slurm sets both variables in the
# environment of each task, and children inherit them; slurmstepd is recognised by its open log file.
tasks() {
  local conf=("-x" "SLURM_CONF=$SLURM_CONF") node=("SLURMD_NODENAME=") log="$ROOT/log/slurmd-" match entry pid
  if [[ $# -gt 0 ]]; then node=("-x" "SLURMD_NODENAME=$1") log="$log$1.log"; fi
  match=$(grep -slz "${conf[@]}" /proc/[0-9]*/environ || true)
  [[ -z $match ]] || match=$(grep -slz "${node[@]}" $match || true)
  for entry in $match; do
    pid=${entry#/proc/} pid=${pid%/environ}
    if [[ $pid != "$$" ]] && alive "$pid"; then echo "$pid"; fi
  done
  for entry in $(grep -slx slurmstepd /proc/[0-9]*/comm || true); do
    pid=${entry#/proc/} pid=${pid%/comm}
    if readlink "/proc/$pid/fd/"* 2>/dev/null | grep -qF "$log" && alive "$pid"; then echo "$pid"; fi
  done
}

# with_descendants PIDS...: these pids and all their descendants.
with_descendants() {
  ps -eo pid=,ppid= | awk -v roots="$*" '
    { parent[$1] = $2 }
    END {
      n = split(roots, r, " "); for (i = 1; i <= n; i++) found[r[i]] = 1
      do { more = 0
        for (p in parent) if (!(p in found) && (parent[p] in found)) { found[p] = 1; more = 1 }
      } while (more)
      for (p in found) print p
    }'
}
