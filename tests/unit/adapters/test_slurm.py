"""Reading what Slurm's commands print, and telling "no" from "no answer"."""

import os
import signal
import sys

import pytest

from yatt.adapters.slurm.slurm import (
    Reply,
    Slurm,
    children_without_term,
    expand_node_list,
    merged_state,
    parse_config,
    parse_jobs,
    parse_lines,
    parse_queue,
    sacct_gpu_seconds,
    seconds_of,
)

# Printed by Slurm 22.05.8 for a heterogeneous job, shortened.
JOB = (
    "JobId=12 HetJobId=12 HetJobOffset=0 JobName=yatt run UserId=u(0) JobState=RUNNING Restarts=1 "
    "TimeLimit=00:02:00 PreemptTime=2026-11-20T20:00:01 NodeList=n[1-2] TRES=cpu=2,node=2,billing=2 "
    "Command=/home/u/a b/job.sh WorkDir=/home/u Comment=two words\n"
    "JobId=13 HetJobId=12 HetJobOffset=1 JobName=yatt JobState=PENDING Reason=Resources NodeList= \n"
)


def test_values_may_hold_blanks_and_equal_signs():
    first, second = parse_lines(JOB)
    assert first["JobName"] == "yatt run"
    assert first["Command"] == "/home/u/a b/job.sh"
    assert first["Comment"] == "two words"
    assert first["TRES"] == "cpu=2,node=2,billing=2"
    assert (second["HetJobOffset"], second["NodeList"]) == ("1", "")


PARAGRAPHS = """JobId=12 HetJobId=12 HetJobOffset=0 JobName=yatt-a lr=1e-6
   UserId=u(0) GroupId=g(0) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   Command=/runs/a lr=1e-6 JobState=FAILED/submitit/submission.sh
   WorkDir=/runs
   Comment=/runs/a lr=1e-6

JobId=13 HetJobId=12 HetJobOffset=1 JobName=yatt
   JobState=PENDING Reason=Resources Dependency=(null)
"""


def test_what_people_choose_is_read_whole_and_is_no_field():
    first, second = parse_jobs(PARAGRAPHS)
    assert first["Command"] == "/runs/a lr=1e-6 JobState=FAILED/submitit/submission.sh"
    assert (first["JobState"], first["Comment"]) == ("RUNNING", "/runs/a lr=1e-6")
    assert (second["JobState"], second["Reason"]) == ("PENDING", "Resources")
    assert parse_jobs("") == []


def test_a_queue_is_read_by_job():
    queue = parse_queue(
        "12+1|PENDING|low||2|Resources|a|/r/submitit/x.sh\n12+0|RUNNING|low|n[1-2]|2|None|a|/r/submitit/x.sh\n"
        "7|RUNNING|high|n9|1|None|a b|/home/a b/x.sh one|two\n9_[1-3]|PENDING|low||1|None|a|x\nnonsense\n"
    )
    assert queue.keys() == {"12", "7"}
    assert [part["NodeList"] for part in queue["12"]] == ["n[1-2]", ""]
    assert queue["7"][0]["Command"] == "/home/a b/x.sh one|two"


def test_a_job_lives_while_a_component_does():
    assert merged_state(parse_lines(JOB)) == "RUNNING"
    assert merged_state([{"JobState": "COMPLETED"}, {"JobState": "FAILED"}]) == "FAILED"
    assert merged_state([{"JobState": "CANCELLED by 0"}]) == "CANCELLED"
    assert merged_state([{"JobState": "REQUEUE_HOLD"}, {"JobState": "FAILED"}]) == "REQUEUE_HOLD"
    assert merged_state([]) == "UNKNOWN"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7],m2", ["n1", "n2", "n3", "n7", "m2"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("r[1-2]c[0-1]-ib", ["r1c0-ib", "r1c1-ib", "r2c0-ib", "r2c1-ib"]),
        ("", []),
    ],
)
def test_node_lists_are_expanded(text, names):
    assert expand_node_list(text) == names


def test_durations():
    assert seconds_of("30 sec") == 30
    assert seconds_of("01:02:03") == 3723
    assert seconds_of("2-00:00:01") == 172801
    assert seconds_of("UNLIMITED") is None


def test_settings():
    assert parse_config("KillWait                = 30 sec\nSlurmctldHost[0] = a(b)\n")["KillWait"] == "30 sec"


@pytest.fixture
def scontrol(tmp_path):
    """Makes a stand-in for the command out of a Python program."""

    def make(code):
        path = tmp_path / "scontrol"
        path.write_text(f"#!{sys.executable}\nimport sys, time\n{code}\n")
        path.chmod(0o700)
        return Slurm({**os.environ, "PATH": str(tmp_path)}, limit_s=1.0)

    return make


def test_no_answer_is_none_and_no_such_job_is_an_empty_list(tmp_path, scontrol):
    assert Slurm({"PATH": str(tmp_path)}).show_job("1") is None
    down = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    slurm = scontrol(f"sys.exit({down!r})")
    assert slurm.show_job("1") is None
    assert slurm.call("scontrol").is_unreachable
    assert scontrol("sys.exit('slurm_load_jobs error: Invalid job id specified')").show_job("1") == []
    hung = scontrol("time.sleep(30)").call("scontrol")
    assert hung.is_unreachable
    assert "did not answer within 1 s" in hung.says


def test_a_requeue_gives_its_answer_though_slurm_ends_every_process_of_the_job(scontrol):
    slurm = scontrol("import os, signal; os.kill(os.getpid(), signal.SIGTERM); print(*sys.argv[1:])")
    with children_without_term():
        assert slurm.requeue("7") == Reply(0, "requeue 7\n", "")
        assert slurm.exclude("7+1", ["n1", "n2"]) == Reply(0, "update jobid=7+1 ExcNodeList=n1,n2\n", "")
    assert slurm.requeue("7").code == -signal.SIGTERM
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_gpu_seconds_are_summed_over_starts_and_components(scontrol, tmp_path):
    lines = (
        "3600|cpu=4,gres/gpu:a100=2,gres/gpu=2\n100|billing=1,gres/gpu=4,node=2\n50|cpu=2\nx|gres/gpu=1\n|\n"
    )
    assert sacct_gpu_seconds(lines) == 3600 * 2 + 100 * 4
    slurm = scontrol("")
    assert slurm.charged_gpu_s(["7"], 1.0) is None, "no sacct"
    (tmp_path / "scontrol").rename(tmp_path / "sacct")
    assert slurm.charged_gpu_s([], 1.0) is None
    assert slurm.charged_gpu_s(["7"], 5.0) == 0.0
