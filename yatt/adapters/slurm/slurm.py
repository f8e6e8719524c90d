"""Slurm's client commands: the only module that runs them and parses their output.

A call that did not reach the controller is never treated as an answer: every query may return None,
"unknown". No shell is used, and slurmdbd is not needed.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

CALL_LIMIT_S = 20.0

PERSON_S = 3.0
"""Time limit of a question for a command at which a person waits, and which can answer without Slurm."""

_UNREACHABLE = ("Unable to contact", "Connection refused", "timed out", "Zero Bytes", "Unexpected message")
_UNKNOWN_JOB = ("Invalid job id", "Invalid job")
_PAIR = re.compile(r"(?:^| )([A-Za-z][\w/:.-]*)=")

_WHOLE_LINES = ("Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment", "SystemComment")
_QUEUED = ("JobState", "Partition", "NodeList", "NumNodes", "Reason", "JobName", "Command")
QUEUE_FORMAT = "%i|%T|%P|%N|%D|%r|%j|%o"

_OUT = {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "INVAL", "NOT_RESPONDING", "UNKNOWN"}

LIVING_STATES = {
    "PENDING",
    "RUNNING",
    "CONFIGURING",
    "COMPLETING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "STAGE_OUT",
    "RESIZING",
    "SPECIAL_EXIT",
}
"""States of a job that has not ended."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of one call. `code` is None if the command is missing or did not answer in time."""

    code: int | None
    out: str
    error: str

    @property
    def is_unreachable(self) -> bool:
        """Whether Slurm's controller did not answer."""
        return self.code is None or (self.code != 0 and any(text in self.error for text in _UNREACHABLE))

    @property
    def says(self) -> str:
        """The error text on one line, without the command's prefix."""
        lines = [re.sub(r"^\w+: (error: )?", "", line) for line in self.error.splitlines() if line.strip()]
        return "; ".join(lines) or f"exit code {self.code}"


Fields = dict[str, str]


class Slurm:
    """Runs the commands of the Slurm installation on the PATH.

    Args:
        env: environment of the commands; None: this process's.
        limit_s: time limit of one call.
    """

    def __init__(self, env: Mapping[str, str] | None = None, limit_s: float = CALL_LIMIT_S) -> None:
        inherited = os.environ if env is None else env
        # The user's own output settings of squeue and times must not change what is parsed here.
        own = {k: v for k, v in inherited.items() if not k.startswith("SQUEUE_") and k != "SLURM_TIME_FORMAT"}
        self._env, self._limit_s = own, limit_s

    def within(self, limit_s: float) -> "Slurm":
        """Returns the same with another time limit of a call."""
        return Slurm(self._env, limit_s)

    @property
    def has_scontrol(self) -> bool:
        """Whether jobs can be queried and requeued from this process."""
        return shutil.which("scontrol", path=self._env.get("PATH")) is not None

    def call(self, *argv: str, limit_s: float | None = None) -> Reply:
        """Runs one command to its end, within `limit_s` or the default limit."""
        limit_s = limit_s or self._limit_s
        try:
            done = subprocess.run(
                argv,
                env=self._env,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except FileNotFoundError:
            return Reply(None, "", f"{argv[0]} is not on the PATH")
        except subprocess.TimeoutExpired:
            return Reply(None, "", f"{argv[0]} did not answer within {limit_s:g} s")
        except OSError as error:
            return Reply(None, "", f"{argv[0]} cannot be run: {error.strerror}")
        return Reply(done.returncode, done.stdout, done.stderr)

    def ask(self, *argv: str) -> str | None:
        """Returns a command's output, or None if it failed for any reason."""
        reply = self.call(*argv)
        return reply.out if reply.code == 0 else None

    def show_job(self, job_id: str, limit_s: float | None = None) -> list[Fields] | None:
        """Returns a job's components from `scontrol`, the leader first; [] if Slurm has no such job."""
        reply = self.call("scontrol", "show", "job", job_id, limit_s=limit_s)
        if reply.code == 0:
            return parse_jobs(reply.out)
        return [] if any(text in reply.error for text in _UNKNOWN_JOB) else None

    def queue(self, *which: str, limit_s: float | None = None) -> dict[str, list[Fields]] | None:
        """Returns jobs by id, each with its components, the leader first, with one call of squeue; None
        without an answer. Fields: JobState, Partition, NodeList, NumNodes, Reason, JobName, Command.

        Args:
            which: squeue's own options: ``--me``, or ``--jobs=1,2`` with ``--states=all``.
        """
        reply = self.call("squeue", "-h", "-o", QUEUE_FORMAT, *which, limit_s=limit_s)
        if reply.code != 0:
            return {} if any(text in reply.error for text in _UNKNOWN_JOB) else None
        return parse_queue(reply.out)

    def show_config(self) -> Fields | None:
        """Returns the controller's settings."""
        text = self.ask("scontrol", "show", "config")
        return None if text is None else parse_config(text)

    def show_partitions(self) -> dict[str, Fields] | None:
        """Returns every partition by its name."""
        text = self.ask("scontrol", "show", "partition", "-o", "--all")
        return None if text is None else {f["PartitionName"]: f for f in parse_lines(text)}

    def show_nodes(self) -> dict[str, Fields] | None:
        """Returns every node by its name."""
        text = self.ask("scontrol", "show", "node", "-o", "--all")
        return None if text is None else {f["NodeName"]: f for f in parse_lines(text)}

    def charged_gpu_s(self, job_ids: Iterable[str], limit_s: float) -> float | None:
        """Returns the GPU seconds of these jobs, all starts of each, from Slurm's accounting; None if it has
        none or does not answer."""
        jobs = ",".join(sorted(set(job_ids)))
        if not jobs:
            return None
        asked = ("sacct", "-nPXD", "--format=ElapsedRaw,AllocTRES", "--jobs", jobs)
        reply = self.call(*asked, limit_s=limit_s)
        return sacct_gpu_seconds(reply.out) if reply.code == 0 else None

    def requeue(self, job_id: str) -> Reply:
        """Requeues a job with all of its components under the same id."""
        return self.call("scontrol", "requeue", job_id)

    def exclude(self, job_id: str, nodes: list[str]) -> Reply:
        """Sets the excluded nodes of a waiting job to `nodes`."""
        return self.call("scontrol", "update", f"jobid={job_id}", f"ExcNodeList={','.join(nodes)}")

    def reserved(self, reservation: str) -> list[str]:
        """Returns the nodes of a reservation; empty without an answer."""
        found = parse_lines(self.ask("scontrol", "show", "reservation", "-o", reservation) or "")
        return expand_node_list(found[0].get("Nodes", "")) if found else []


def is_up(node: Fields) -> bool:
    """Whether Slurm can allocate the node, now or after its current job."""
    state = node.get("State", "UNKNOWN")
    return not state.endswith("*") and not set(state.rstrip("*~#!%$@^-").split("+")) & _OUT


def node_gpus_by_type(node: Fields) -> dict[str, int]:
    """Returns the configured GPUs of a node by type; "" for those without a type."""
    found: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", node.get("Gres", "")).split(","):
        name, *rest = item.split(":")
        if name == "gpu":
            count = int(rest[-1]) if rest and rest[-1].isdigit() else 1
            kind = rest[0] if rest and not (len(rest) == 1 and rest[0].isdigit()) else ""
            found[kind] = found.get(kind, 0) + count
    return found


@contextmanager
def children_without_term() -> Iterator[None]:
    """Context manager: blocks SIGTERM in children of this thread. Slurm sends it to every process of a
    requeued job, also to the command that requested the requeue, which must still return its answer."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def environment_outside_jobs(env: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment to submit from: without a surrounding job's variables, but with SLURM_CONF."""
    inside = ("SLURM", "SBATCH_", "SRUN_", "SUBMITIT_")
    return {k: v for k, v in env.items() if not k.startswith(inside) or k == "SLURM_CONF"}


def parse_lines(text: str) -> list[Fields]:
    """Parses ``scontrol show ... -o``: one object per line, ``Key=value`` pairs; values may contain
    blanks."""
    return [fields for line in text.splitlines() if (fields := _parse_line(line))]


def parse_jobs(text: str) -> list[Fields]:
    """Parses ``scontrol show job``: paragraphs of lines. Free-text fields have a line of their own."""
    jobs: list[Fields] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        fields: Fields = {}
        for line in paragraph.splitlines():
            key, _, rest = line.strip().partition("=")
            for name, value in ({key: rest} if key in _WHOLE_LINES else _parse_line(line)).items():
                fields.setdefault(name, value)
        if fields:
            jobs.append(fields)
    return jobs


def parse_queue(text: str) -> dict[str, list[Fields]]:
    """Parses squeue's output in `QUEUE_FORMAT`."""
    jobs: dict[str, list[tuple[int, Fields]]] = {}
    for line in text.splitlines():
        job_id, _, rest = line.partition("|")
        values = rest.split("|", len(_QUEUED) - 1)
        number, _, offset = job_id.partition("+")
        if number.isdigit() and len(values) == len(_QUEUED):
            found = (int(offset or 0), dict(zip(_QUEUED, values, strict=True)))
            jobs.setdefault(number, []).append(found)
    return {number: [fields for _, fields in sorted(parts, key=_offset)] for number, parts in jobs.items()}


def _offset(part: tuple[int, Fields]) -> int:
    return part[0]


def _parse_line(line: str) -> Fields:
    found = list(_PAIR.finditer(line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    fields: Fields = {}
    for match, end in zip(found, ends, strict=True):
        fields.setdefault(match[1], line[match.end() : end].strip())
    return fields


def parse_config(text: str) -> Fields:
    """Parses ``scontrol show config``: one ``Key = value`` per line."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def sacct_gpu_seconds(text: str) -> float:
    """Returns the sum over lines of sacct, each ``SECONDS|cpu=4,gres/gpu=2,gres/gpu:a100=2``."""
    total_s = 0.0
    for line in text.splitlines():
        seconds, _, allocated = line.partition("|")
        found = re.search(r"(?:^|,)gres/gpu=(\d+)", allocated)
        if seconds.isdigit() and found:
            total_s += float(seconds) * int(found[1])
    return total_s


def expand_node_list(node_list: str) -> list[str]:
    """Returns the names in a compressed node list, in order.

    Raises:
        ValueError: the text is not such a list.
    """
    names: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", node_list):
        names += _expand_one(part)
    return names


def _expand_one(part: str) -> list[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)$", part)
    if match is None:
        return [part]
    head, ranges, tail = match.groups()
    names: list[str] = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        for number in range(int(first), int(last or first) + 1):
            names += _expand_one(f"{head}{number:0{len(first)}d}{tail}")
    return names


def expand_counts(counts: str) -> list[int]:
    """Returns the numbers in a compressed list, in order: ``72(x2),36`` is 72, 72, 36.

    Raises:
        ValueError: the text is not such a list.
    """
    numbers: list[int] = []
    for part in filter(None, counts.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"'{counts}' is not a list of counts")
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def keeps_accounts(config: Fields) -> bool:
    """Whether the cluster has an accounting database; newer versions show (null) if not."""
    kind = config.get("AccountingStorageType", "")
    return not kind.endswith("/none") and kind not in ("", "(null)")


def merged_state(components: list[Fields]) -> str:
    """Returns one state for a job with several components: active if any of them is."""
    states = [fields.get("JobState", "UNKNOWN").split()[0] for fields in components]
    for state in ("RUNNING", "COMPLETING", "CONFIGURING", "PENDING", *sorted(LIVING_STATES)):
        if state in states:
            return state
    return next((state for state in states if state != "COMPLETED"), states[0] if states else "UNKNOWN")


def submitted_at(components: list[Fields] | None) -> str:
    """Returns when a job was submitted or requeued, as ISO-8601 in UTC; empty if Slurm does not say.

    Args:
        components: from `Slurm.show_job`; Slurm's times are local and have no zone.
    """
    text = components[0].get("SubmitTime", "") if components else ""
    try:
        return datetime.fromisoformat(text).astimezone(UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return ""


def seconds_of(duration: str) -> float | None:
    """Parses Slurm's ``days-hours:minutes:seconds``, or ``30 sec``; None for UNLIMITED and similar."""
    text = duration.removesuffix(" sec").strip()
    if text.isdigit():
        return float(text)
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in [*parts, days or "0"]):
        return None
    seconds = 0.0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return seconds + int(days or 0) * 86400.0
