"""Progress that nodes tell each other: what is done counts, waiting for one another never does."""

import pytest

from yatt.control.membership.progress import Progress

ROUNDS = 20


class Pair:
    """Two nodes, each with a request under way at the other, which say what they know round by round."""

    def __init__(self, first: int, second: int) -> None:
        self.names = (f"node{first}", f"node{second}")
        self.work = [0, 0]
        self.nodes = [Progress(lambda: self.work[0]), Progress(lambda: self.work[1])]
        self._last = [-1, -1]

    def speak(self) -> None:
        for here, there in ((0, 1), (1, 0)):
            told = self.nodes[there].told_to(self.names[here])
            if told != self._last[here]:
                self.nodes[here].heard()
            self._last[here] = told

    def what_the_leader_hears(self) -> list[int]:
        return [node.told_to("node0") for node in self.nodes]


@pytest.mark.parametrize("pair", [(0, 1), (1, 2)])
def test_two_nodes_that_wait_for_each_other_come_to_rest(pair) -> None:
    nodes = Pair(*pair)
    for _ in range(3):
        nodes.speak()
    heard = nodes.what_the_leader_hears()
    for _ in range(ROUNDS):
        nodes.speak()
    assert nodes.what_the_leader_hears() == heard


def test_what_another_node_does_for_one_is_told_to_the_leader() -> None:
    nodes = Pair(1, 2)
    for _ in range(3):
        nodes.speak()
    before = nodes.what_the_leader_hears()
    nodes.work[1] += 1
    nodes.speak()
    assert nodes.what_the_leader_hears()[0] > before[0], "node2 works for node1"


def test_the_end_of_a_call_and_a_workers_own_question_count() -> None:
    node = Progress(lambda: 7)
    before = node.told_to("node3")
    node.done()
    assert node.told_to("node3") == before + 1
    node.heard()
    assert node.told_to("node3") == before + 1
    assert node.told_to("reward-n0r0.1") == node.told_to("node0") == before + 2
