"""One rank of a vLLM engine that loads whole tensors, then slices of the same ones.

``python -m tests.sliced_engine FOLDER RANK NUM_RANKS SPOILED`` writes what it saw to FOLDER/RANK.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from tests.contract.test_engine import PROMPT, options_for, weights_of
from tests.sliced_weights import packed_copy, part_sums, rank_plan, spanning_config, write_rank
from tests.tiny_models import publish_tensors
from yatt.adapters.files.files import write_atomically
from yatt.adapters.node_local.host_segment import Stamp
from yatt.engine.environment import prepare_environment, prepare_rank
from yatt.engine.weights.published import INDEX_NAME, PublicationIndex
from yatt.errors import WorkerFailed
from yatt.models.cuts import engine_cuts
from yatt.models.model import read_model
from yatt.records.weights import WeightCut

VERSION = 3


def publish_slices(folder: Path, model: str, part: int, num_ranks: int, spoiled: str = "") -> str:
    """The publication of one node, with slices of what two trainer ranks have.

    Args:
        spoiled: a tensor whose cut is planted wrong, by one row; empty: none.
    """
    import torch

    config = spanning_config(model, tp_size=num_ranks, trainer={"ranks": 2, "tensor_model_parallel_size": 2})
    known, tensors, stems = read_model(model), weights_of(model), []
    cuts = engine_cuts(config, known.rows, known.shape)
    for rank in range(2):
        plan, size_bytes = rank_plan(config, known, rank, 2)
        if spoiled:
            plan = msgspec.structs.replace(
                plan, weights=tuple(_spoilt(each, spoiled) for each in plan.weights)
            )
        stem = folder / f"trainer-{part}-{rank}{spoiled}"
        write_rank(stem, plan, size_bytes, tensors).complete(Stamp(1, VERSION))
        stems.append(folder / f"fetched-{part}-{rank}{spoiled}")
        packed_copy(stem, stems[-1], part, Stamp(1, VERSION))
    assert all(torch.is_tensor(each) for each in tensors.values())
    (published := folder / f"slices-{part}{spoiled}").mkdir()
    sums = {name: each[part] for name, each in part_sums(tensors, cuts.cuts).items()}
    index = PublicationIndex(
        policy_version=VERSION, attempt=1, stems=tuple(map(str, stems)), sums={}, part=part, part_sums=sums
    )
    write_atomically(published / INDEX_NAME, msgspec.json.encode(index))
    return str(published)


def _spoilt(planned: Any, name: str) -> Any:
    if planned.name != name:
        return planned
    cut = planned.cut
    spans = tuple((max(begin - 1, 0), end - 1) for begin, end in cut.spans)
    return msgspec.structs.replace(planned, cut=WeightCut(dim=cut.dim, spans=spans))


def parameters(engine: Any) -> dict[str, str]:
    """Checksums of all that an engine's model has."""
    from yatt.weights.checksum import tensor_checksum

    model = engine._llm.model_executor.driver_worker.model_runner.get_model()
    return {name: tensor_checksum(each) for name, each in (*model.named_parameters(), *model.named_buffers())}


def main(folder: Path, rank: int, num_ranks: int, spoiled: str) -> None:
    prepare_environment(device="cpu", threads=1)
    prepare_rank(rank, num_ranks)
    import torch.distributed as dist

    from yatt.engine.build import build_engine

    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=num_ranks)
    first, other = (str(folder / name) for name in ("first", "other"))
    engine = build_engine("vllm", options_for(first, tp_size=num_ranks, num_ranks=num_ranks))
    engine.start()
    told: dict[str, Any] = {}
    whole = publish_tensors(folder / f"whole-{rank}", weights_of(first), 1, cuts=2)
    engine.load_weights(1, whole)
    expected, told["whole"] = parameters(engine), engine.score([PROMPT])[0]
    engine.load_weights(2, publish_tensors(folder / f"between-{rank}", weights_of(other), 2))
    assert parameters(engine).items() != expected.items(), "the other weights are other ones"
    engine.load_weights(VERSION, publish_slices(folder, first, rank, num_ranks))
    found = parameters(engine)
    told["differing"] = sorted(name for name, each in found.items() if expected[name] != each)
    told["num_parameters"], told["sliced"] = len(found), engine.score([PROMPT])[0]
    try:
        engine.load_weights(VERSION, publish_slices(folder, first, rank, num_ranks, spoiled))
    except WorkerFailed as error:
        told["error"] = str(error)
    try:
        engine.score([PROMPT])
    except WorkerFailed as error:
        told["refused"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
