"""A trainer rank that does not see the store reports that, not a damaged checkpoint."""

import pytest
import torch

from tests.unit.core.test_placement import config
from yatt.checkpoint.commit.ownership import claim_store
from yatt.checkpoint.store.store import FolderStore
from yatt.errors import StoreUnreachable
from yatt.records import message as m

pytestmark = pytest.mark.filterwarnings("ignore")
ORDER = m.Restore(checkpoint="manifests/00000004.000001.json")


def rank_with(store):
    from yatt.trainer.worker import TrainerRank  # megatron-core warns where it is imported

    return TrainerRank(config(1, 1, 0, 0), torch.device("cpu"), store, tick=lambda: None, say=print)


def test_a_folder_without_even_an_owner_is_not_mounted_on_this_node(tmp_path):
    with pytest.raises(StoreUnreachable, match="is it mounted here"):
        rank_with(FolderStore(tmp_path)).handle(ORDER)


def test_a_manifest_that_is_gone_from_the_runs_own_store_is_a_fault_of_the_checkpoint(tmp_path):
    store = FolderStore(tmp_path)
    claim_store(store, str(tmp_path), "mine")
    answer = rank_with(store).handle(ORDER)
    assert isinstance(answer, m.Restored)
    assert "manifests/00000004.000001.json" in answer.fault
