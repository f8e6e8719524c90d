"""Checkpoints of a Hugging Face folder's weights in any layout, made without a trainer."""

import json
import math
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from tests.runs import RunFile
from yatt.adapters.run_folder.ledger import COMMITTED, ENDED, STARTED, write_record
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest
from yatt.checkpoint.commit.pieces import checksum, header_of
from yatt.checkpoint.store.store import Store, open_store
from yatt.config.load import load_run_config
from yatt.control.rollouts.groups.carried import write_state
from yatt.control.rollouts.groups.groups import NodeState
from yatt.core.attempts.checkpoint_names import node_state_path
from yatt.launch.folder.folder import open_folder
from yatt.launch.resolve.completed import completed_config
from yatt.models.model import Model, read_model
from yatt.models.rows import WeightRow
from yatt.records.message import ShardFile, TensorPiece
from yatt.weights.boxes import blocks_of, boxes_of
from yatt.weights.convert import HFTensors, cut_shard

Piece = tuple[str, WeightRow, tuple[int, ...], torch.Tensor]


def cut_dim(row: WeightRow) -> int | None:
    """The dimension that tensor parallelism cuts."""
    if row.name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return 1
    if row.name.endswith("heads_weight"):
        return 0
    return None if row.is_tower or "norm" in row.name or "router" in row.name else 0


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {key: t for file in sorted(folder.glob("*.safetensors")) for key, t in load_file(file).items()}


def save(
    store: Store, folder: Path, *, tp: int = 1, pp: int = 1, dp: int = 1, dtype: torch.dtype = torch.float32,
    iteration: int = 1, attempt: int = 1, parent: tuple[int, int] = (0, 0), run_id: str = "",
) -> Manifest:  # fmt: skip
    """Writes and commits what a run in this layout would; the start must have adopted something."""
    model, source = read_model(str(folder)), HFTensors(str(folder))
    checkpoints = Checkpoints(store, attempt, run_id)
    prefix = checkpoints.prefix(iteration)
    files = []
    for rank, pieces in enumerate(_ranks(model, source, dtype, (tp, pp, dp))):
        if pieces:
            files.append(_write(store, f"{prefix}/rank-{rank:05d}.safetensors", pieces))
    node = write_state(store, node_state_path(prefix, 0), NodeState(next_number=8 * iteration))
    manifest = Manifest(
        iteration=iteration, attempt=attempt, parent=parent, run_id=run_id, config_hash="test",
        files=tuple(files), common=msgspec.Raw(b"{}"), nodes=(node,),
    )  # fmt: skip
    checkpoints.commit(manifest)
    return manifest


def _ranks(model: Model, source: HFTensors, dtype: torch.dtype, sizes: tuple[int, int, int]):
    tp, pp, dp = sizes
    height = -(-len(model.rows) // pp)
    for stage in range(pp):
        rows = model.rows[stage * height : (stage + 1) * height]
        for tp_rank in range(tp):
            for dp_rank in range(dp):
                yield [
                    piece
                    for row in rows
                    for piece in _pieces(row, source, dtype, (tp_rank, tp), (dp_rank, dp))
                ]


def _pieces(row: WeightRow, source: HFTensors, dtype: torch.dtype, of_tp: tuple, of_dp: tuple):
    (tp_rank, tp), (dp_rank, dp) = of_tp, of_dp
    dim = cut_dim(row)
    if dim is None and tp_rank:
        return
    full = source.read_parameter(row).to(dtype)
    local = cut_shard(row, full, dim, rank=tp_rank, size=tp).contiguous().view(-1)
    step = -(-len(local) // dp)
    begin, end = dp_rank * step, min(len(local), (dp_rank + 1) * step)
    kinds = {"main": torch.float32, "exp_avg": torch.float32}
    if dtype is not torch.float32:
        kinds["model"] = dtype
    for box in boxes_of(blocks_of(row, dim, rank=tp_rank, size=tp), begin, end):
        data = local[box.start :][: math.prod(box.shape)].view(box.shape)
        for kind, wanted in kinds.items():
            values = data * 0 if kind == "exp_avg" else data
            yield kind, row, box.offset, values.to(wanted)


def _write(store: Store, path: str, pieces: list[Piece]) -> ShardFile:
    names = [str(tensor.dtype).removeprefix("torch.") for *_, tensor in pieces]
    header = header_of((n, t.shape, t.nbytes) for n, (*_, t) in zip(names, pieces, strict=True))
    chunks, described, begin = [header], [], len(header)
    for dtype, (kind, row, offset, tensor) in zip(names, pieces, strict=True):
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        described.append(
            TensorPiece(
                key=f"{kind}.{row.name}", dtype=dtype, global_shape=row.full_shape, global_offset=offset,
                local_shape=tuple(tensor.shape), begin=begin, size_bytes=len(data), checksum=checksum(data),
            )
        )  # fmt: skip
        chunks.append(data)
        begin += len(data)
    written = store.write_stream(path, lambda: iter(chunks))
    return ShardFile(
        path=path, size_bytes=written.size_bytes, checksum=written.checksum, tensors=tuple(described)
    )


def saved_run(folder: Path, *, iterations=(1, 2, 3, 4), attempt=1, **settings) -> RunFile:
    """A run that has saved these iterations and ended; no trainer ran."""
    settings.setdefault("checkpoint", {"keep": 2})
    run = RunFile(folder, settings)
    config = completed_config(load_run_config([run.write()], []))
    paths = open_folder(config)
    (paths.claims).mkdir(exist_ok=True)
    (paths.claims / f"{attempt:06d}").write_text("claimed")
    write_record(paths, attempt, STARTED, {})
    store = open_store(
        config.checkpoint.url or str(paths.root / "checkpoints"), config.checkpoint.storage_options
    )
    start = Checkpoints(store, attempt, config.run.id)
    start.adopt(None)
    for iteration in iterations:
        save(store, run.folder / "policy", dp=2, iteration=iteration, attempt=attempt, run_id=config.run.id)
        line = {"training/global_step": iteration, "critic/rewards/mean": -abs(iteration - 2.0)}
        with paths.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
    if iterations:
        write_record(paths, attempt, COMMITTED, {"iteration": iterations[-1]})
    write_record(paths, attempt, ENDED, {"exit_code": 0})
    return run
