"""Sums of all nodes' steps: they only grow, whatever lives a node has had."""

from dataclasses import replace
from pathlib import Path

from yatt.config.load import load_run_config
from yatt.config.sections.judges import ThinkSection
from yatt.control.leader.slabs.measured import BatchLengths, Measurements
from yatt.control.leader.slabs.node_loads import NodeLoads
from yatt.records.load import NodeLoad, SlabLoad, StepSums

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"
JUDGE = "genrm:judge"


def test_a_backlog_counts_the_tokens_of_one_answer_for_each_question() -> None:
    """Three answers of 20 tokens about each of ten completions, then seven questions that wait."""
    now = NodeLoad()
    measured = Measurements(config=load_run_config([QUICKSTART], []), loads=NodeLoads(lambda: now))
    measured.begin()
    sums = {"rollout": StepSums(steps=100, running=1000, seconds=1.0, texts=10)}
    now = NodeLoad(steps={**sums, JUDGE: StepSums(steps=60, running=600, seconds=1.0, texts=30)})
    measured.batch_over(BatchLengths(lengths=(100,) * 10, num_samples=10))
    now = NodeLoad(steps=now.steps, num_asked={JUDGE: 7})
    assert (measured.tokens, measured.questions) == ({JUDGE: 60.0}, {JUDGE: 3.0})
    assert measured.backlog() == {JUDGE: 140.0}
    (judge,) = measured.config.genrms
    thinks = replace(judge, think=ThinkSection(budget=8))
    measured.config = replace(measured.config, genrms=(thinks,))
    assert measured.questions == {JUDGE: 1.5}, "a thought and its verdict are one answer"
    assert measured.backlog() == {JUDGE: 280.0}


def load(steps: int, judged: int = 0) -> NodeLoad:
    sums = {"rollout": StepSums(steps=steps)} | ({"genrm:a": StepSums(steps=judged)} if judged else {})
    return NodeLoad(slabs=(SlabLoad(0, "rollout", 1),), steps=sums)


def steps_of(loads: NodeLoads) -> dict[str, int]:
    return {role: sums.steps for role, sums in loads.steps().items()}


def test_the_newest_report_of_each_node_counts_once() -> None:
    loads = NodeLoads(lambda: load(1))
    loads.put(1, 1, load(10))
    loads.put(1, 1, load(30, judged=4))
    loads.put(2, 1, load(200))
    assert steps_of(loads) == {"rollout": 231, "genrm:a": 4}
    assert steps_of(loads) == {"rollout": 231, "genrm:a": 4}, "asking changes nothing"


def test_the_steps_of_lives_that_are_over_and_of_lost_nodes_stay() -> None:
    loads = NodeLoads(NodeLoad)
    loads.put(1, 1, load(10, judged=3))
    loads.gone(1)
    assert steps_of(loads) == {"rollout": 10, "genrm:a": 3}
    assert loads.now()[1].slabs == ()
    loads.put(1, 2, load(5))
    assert steps_of(loads) == {"rollout": 15, "genrm:a": 3}
    loads.put(1, 2, load(7))
    loads.put(1, 4, load(1))
    assert steps_of(loads) == {"rollout": 18, "genrm:a": 3}
