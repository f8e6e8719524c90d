"""The choice of the next batch's split, from what was measured."""

from collections.abc import Sequence
from typing import Any

from yatt import clock
from yatt.adapters.thread_call import call_in_thread
from yatt.control.leader.measured import Measurements
from yatt.core.placement import ROLLOUT
from yatt.core.prediction import predict
from yatt.core.split import choose


async def next_split(
    splits: Sequence[dict[str, int]], measured: Measurements
) -> tuple[dict[str, int], dict[str, Any]]:
    """Chooses in a thread; returns the split, and the fields of the event about it.

    Args:
        splits: of the batches before, oldest first.
    """
    roles, demand, (switch_s, _) = measured.roles(), measured.demand(), measured.switch_s()

    def chosen() -> tuple[dict[str, int], float, float]:
        best = choose(splits, demand, roles, ROLLOUT, switch_s)
        now_s, best_s = (predict(each, demand, roles, ROLLOUT, switch_s) for each in (splits[-1], best))
        return best, now_s, best_s

    tokens, began_s = dict(measured.tokens), clock.monotonic_s()
    split, now_s, best_s = await call_in_thread(chosen)
    return split, {
        "before": splits[-1], "after": split, "predicted_s": round(now_s, 6), "chosen_s": round(best_s, 6),
        "num_samples": demand.num_samples, "tokens": tokens, "switch_s": round(switch_s, 6),
        "took_s": round(clock.monotonic_s() - began_s, 6),
    }  # fmt: skip
