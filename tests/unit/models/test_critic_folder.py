"""A critic's folder is refused before the start as in the trainer."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import make_qwen3
from tests.unit.models.test_model import run_file
from yatt.config.load import load_run_config
from yatt.errors import ConfigError
from yatt.launch.checks.policy_check import check_policy

GAE = ["algorithm.adv_estimator=gae", "rollout.n=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("critics")
    make_qwen3(folder / "policy", tied=False)
    return folder


@pytest.fixture
def critic(folder: Path, tmp_path: Path) -> Path:
    """A copy of the policy's folder with the tensors of a reward model."""
    path = tmp_path / "critic"
    path.mkdir()
    tensors = {
        k: v for k, v in load_file(folder / "policy" / "model.safetensors").items() if "lm_head" not in k
    }
    width = tensors["model.norm.weight"].shape[0]
    save_file(tensors | {"score.weight": torch.zeros(1, width)}, path / "model.safetensors")
    values = json.loads((folder / "policy" / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(values | {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1})
    )
    return path


def check(folder: Path, *settings: str) -> None:
    check_policy(load_run_config([run_file(folder)], [*GAE, *settings]))


def test_a_reward_model_and_the_policy_itself_are_critics(folder: Path, critic: Path) -> None:
    check(folder)
    check(folder, f"critic.path={critic}")
    check(folder, f"critic.path={folder / 'policy'}")


def refusal(folder: Path, critic: Path, *settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(folder, f"critic.path={critic}", *settings)
    return str(caught.value)


def test_a_folder_that_is_no_model_is_told_once(folder: Path, tmp_path: Path) -> None:
    assert refusal(folder, tmp_path / "none").startswith("critic.path: there is no folder")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 4}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    says = refusal(folder, tmp_path)
    assert says.startswith("critic.path: ") and "architecture 'bert' is not supported" in says


FEW = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
STAGES = ["trainer.pipeline_model_parallel_size=2", "launch.gpus_per_node=2"]


@pytest.mark.parametrize(
    ("changed", "settings", "says"),
    [
        ({"vocab_size": 60}, [], "has 60 tokens and the policy"),
        (FEW, STAGES, "does not fit the trainer's layout. trainer.pipeline_model_parallel_size 2 is more"),
        ({"max_position_embeddings": 4}, [], "critic.path: data.max_prompt_tokens + rollout.max_response"),
    ],
)
def test_sizes_that_do_not_fit_are_told(
    folder: Path, critic: Path, changed: dict[str, object], settings: list[str], says: str
) -> None:
    values = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps(values | changed))
    found = refusal(folder, critic, *settings)
    assert found.startswith("critic.path: ") and says in found


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"score.weight": torch.zeros(2, 64)}, "has the tensor score.weight with shape (2, "),
        ({"score.bias": torch.zeros(1)}, "has tensors that the weight table does not use: score.bias"),
        ({"model.norm.weight": None}, "has no tensor model.norm.weight"),
    ],
)
def test_tensors_that_are_no_critics_are_told(
    folder: Path, critic: Path, tensors: dict[str, torch.Tensor | None], says: str
) -> None:
    file = critic / "model.safetensors"
    kept = load_file(file) | tensors
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, file)
    found = refusal(folder, critic)
    assert found.startswith(f"critic.path: {critic} ") and says in found


def test_models_with_pictures_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    from tests.unit.models.test_seeing import QWEN3_8B

    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "takes pictures, and a critic takes none yet; write grpo, or a text model." in refusal(
        folder, tmp_path
    )
