"""The process that computes advantages as the trainer does, since the command itself loads no torch.

It reads an `AdvantageOrder` from its standard input, and writes an advantage for each sample: that of its
first token.
"""

import sys

import msgspec

from yatt.evaluation.again import AdvantageOrder


def answer_order() -> int:
    """Reads the order, and writes the advantages."""
    import torch

    from yatt.algo.advantage import RewardTable, advantages

    order = msgspec.json.decode(sys.stdin.buffer.read(), type=AdvantageOrder)
    found: list[float] = []
    for batch in order.batches:
        lengths_N = torch.tensor([max(1, each) for each in batch.lengths])
        table = RewardTable(
            rewards_N=torch.tensor(batch.rewards, dtype=torch.float64),
            groups_N=torch.tensor(batch.groups),
            lengths_N=lengths_N,
        )
        advantages_T = advantages(order.estimator, table, order.gamma)
        found += advantages_T[lengths_N.cumsum(0) - lengths_N].tolist()
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(answer_order())
