"""Parameter groups after a resume: the saved scalars, in the groups of this run's layout."""

from types import SimpleNamespace

from tests.packages import trainer_module


def groups(lr: float) -> list[dict[str, object]]:
    """Those of a policy with experts that are spread over ranks; all but this is equal."""
    same = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "lr": lr}
    return [{**same, "is_expert_parallel": is_spread, "params": [is_spread]} for is_spread in (False, True)]


def test_a_group_of_dense_weights_is_none_of_experts_after_a_resume() -> None:
    snapshot = trainer_module("state.snapshot")
    ours = groups(0.1)
    policy = SimpleNamespace(optimizer=SimpleNamespace(param_groups=ours))
    saved = [{key: value for key, value in group.items() if key != "params"} for group in groups(0.3)]
    snapshot._set_groups(policy, saved)
    assert ours == groups(0.3)
    snapshot._set_groups(policy, saved[::-1])
    assert ours == groups(0.3)
