"""The routes of tokens to experts: counted for metrics, and replayed.

With `trainer.replays_routes` an update sends each token to the experts that the policy before the iteration
chose, because log-probs of another choice differ by more than rounding, and the ratio of new and old policy
then says little. The router's weights of the chosen experts, and so its gradient, are those of now. Source:
Ma et al., rollout routing replay, arXiv:2510.11370; here the routes are the trainer's own.

megatron-core's router asks an object for its choice (`router_replay`); its own class keeps one global state,
which is wrong when a layer is computed again in the backward pass of an earlier micro-batch. This one is told
which micro-batch runs.

Suffixes: S tokens of a micro-batch on this rank, K experts of a token, L layers, E experts.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from yatt.models.shape import Shape
from yatt.trainer.attention.batches import MicroBatch
from yatt.trainer.forward.stats import load_metrics

Around = Callable[[nn.Module, MicroBatch], AbstractContextManager[None]]
"""Surrounds the forward pass of a model chunk with a micro-batch."""


def nothing_around(_chunk: nn.Module, _micro: MicroBatch) -> AbstractContextManager[None]:
    """Leaves routes alone."""
    return contextlib.nullcontext()


@dataclass(slots=True)
class LayerRoutes:
    """What a layer's router asks for its choice. `layer`: its number in the whole model, from 0.

    `newest_SK`: the last choice. `given_SK`: the choice to repeat, while its forward pass runs.
    `again`: those of forward passes whose backward pass may compute the layer again, in order.
    """

    layer: int
    newest_SK: Tensor | None = None
    given_SK: Tensor | None = None
    again: deque[Tensor] = field(default_factory=deque)
    is_forward: bool = False

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Any
    ) -> tuple[Tensor, Tensor]:
        """Chooses `topk` experts per token, by `choose` or as given. Returns their scores and numbers.

        The name and the arguments are megatron-core's.

        Args:
            scores: [S, E], by which is chosen.
        """
        given_SK = self.given_SK
        if not self.is_forward and self.again:
            given_SK = self.again.popleft()
        if given_SK is None:
            chosen_SK, indices_SK = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
            self.newest_SK = indices_SK
            return chosen_SK, indices_SK
        indices_SK = given_SK.long()
        self.newest_SK = indices_SK
        return scores.gather(1, indices_SK), indices_SK


class Routes:
    """The routes of a policy with experts on this rank; without experts it does nothing.

    Args:
        chunks: the model chunks, as they are called.
        is_replayed: whether updates repeat recorded routes.
        is_recomputed: whether backward passes may compute routers again.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        shape: Shape,
        device: torch.device,
        *,
        is_replayed: bool,
        is_recomputed: bool,
    ) -> None:
        experts = shape.experts
        self._is_replayed, self._is_recomputed = is_replayed and experts is not None, is_recomputed
        self._layers = {id(chunk): [*_attach(chunk)] for chunk in chunks} if experts else {}
        self._recorded: dict[tuple[int, int], list[Tensor]] = {}
        size = (shape.num_layers, experts.num_experts if experts else 0)
        self._counts_LE = torch.zeros(size, dtype=torch.int64, device=device)

    @property
    def old(self) -> Around:
        """Surrounds passes of the policy before the iteration: records, if updates repeat."""
        return self._recording if self._is_replayed else nothing_around

    @property
    def update(self) -> Around:
        """Surrounds passes of updates: repeats what was recorded of a micro-batch, and counts."""
        return self._counting if self._layers else nothing_around

    @contextlib.contextmanager
    def _recording(self, chunk: nn.Module, micro: MicroBatch) -> Iterator[None]:
        yield
        newest = [layer.newest_SK for layer in self._layers[id(chunk)]]
        kept = [indices_SK.to(torch.int16) for indices_SK in newest if indices_SK is not None]
        assert len(kept) == len(newest), "every router was asked"
        self._recorded[id(chunk), id(micro)] = kept

    @contextlib.contextmanager
    def _counting(self, chunk: nn.Module, micro: MicroBatch) -> Iterator[None]:
        layers = self._layers[id(chunk)]
        given = self._recorded.get((id(chunk), id(micro)))
        for number, layer in enumerate(layers):
            layer.is_forward, layer.given_SK = True, given[number] if given else None
        yield
        for layer in layers:
            assert layer.newest_SK is not None, "every router was asked"
            layer.is_forward, layer.given_SK = False, None
            if self._is_recomputed:  # what is computed again has to choose the same, replayed or not
                layer.again.append(layer.newest_SK.to(torch.int16))
            chosen = layer.newest_SK.flatten()
            self._counts_LE[layer.layer].scatter_add_(0, chosen, torch.ones_like(chosen))

    def finish(self) -> dict[str, float]:
        """Forgets an iteration's routes; returns the metrics of its updates. Collective over all ranks."""
        self._recorded.clear()
        if not self._layers:
            return {}
        self.end_update()
        counts_LE = self._counts_LE.clone()
        dist.all_reduce(counts_LE)
        self._counts_LE.zero_()
        return load_metrics(counts_LE.cpu())

    def end_update(self) -> None:
        """Forgets what no backward pass will ask for any more."""
        for layer in (layer for layers in self._layers.values() for layer in layers):
            layer.again.clear()
            layer.newest_SK = None


def _attach(chunk: nn.Module) -> Iterator[LayerRoutes]:
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module.router_replay = LayerRoutes(layer=module.layer_number - 1)
            yield module.router_replay
