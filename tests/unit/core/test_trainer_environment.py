"""Variables that trainer ranks on GPUs get, and those of the user that are kept or refused."""

from dataclasses import replace

import pytest

from tests.unit.core.test_placement import config
from yatt.config.schema import RunConfig
from yatt.core.attempts.trainer_environment import CONNECTIONS, contrary_variables, trainer_variables


def run(*, is_deterministic: bool = False, **layout: int) -> RunConfig:
    plain = config(1, 4, 0, 0)
    return replace(
        plain,
        trainer=replace(plain.trainer, **layout),
        run=replace(plain.run, deterministic=is_deterministic),
    )


@pytest.mark.parametrize("layout", [{"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}])
def test_ranks_that_overlap_communication_get_one_connection(layout: dict[str, int]) -> None:
    assert trainer_variables(run(**layout)) == {CONNECTIONS: "1"}
    assert trainer_variables(run(pipeline_model_parallel_size=2)) == {}


def test_another_number_of_connections_is_kept_and_said() -> None:
    (found,) = contrary_variables(run(tensor_model_parallel_size=2), {CONNECTIONS: "32"})
    assert not found.is_refused and found.says.startswith("is 32; with tensor or context parallelism")
    assert not [*contrary_variables(run(tensor_model_parallel_size=2), {CONNECTIONS: "1"})]
    assert not [*contrary_variables(run(), {CONNECTIONS: "32"})], "without TP and CP it is free"


def test_deterministic_ranks_get_what_makes_them_so() -> None:
    variables = trainer_variables(run(is_deterministic=True))
    assert variables == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "NCCL_ALGO": "^NVLS",
    }
    assert not [*contrary_variables(run(is_deterministic=True), variables)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("CUBLAS_WORKSPACE_CONFIG", ":0:0"), ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"), ("NCCL_ALGO", "NVLS")],
)
def test_a_variable_that_breaks_determinism_is_refused_by_name(name: str, value: str) -> None:
    (found,) = contrary_variables(run(is_deterministic=True), {name: value})
    assert (found.name, found.is_refused) == (name, True)
    assert f"is {value}, with which run.deterministic" in found.says and "or write" in found.says
    assert not [*contrary_variables(run(), {name: value})], "only deterministic runs care"
    assert not [*contrary_variables(run(is_deterministic=True), {"NCCL_ALGO": "Ring"})]
