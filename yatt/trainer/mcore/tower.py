"""The tower of a model that takes pictures, which is transformers' own module, and the features of pictures.

A tower that is not trained gets each picture alone, so that no other one changes a bit of its features; one
that is trained gets those of a micro-batch together. Suffixes: P patches, A tiles, N tokens, H hidden size.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from yatt.adapters.node_local.prepared_media import PreparedMedia, parts_of_prepared, with_frames
from yatt.errors import ConfigError, WorkerFailed, error_line
from yatt.models.pictures.tokens import PixelScale
from yatt.models.shape import Shape, TiledVision
from yatt.models.towers.tower import trains_parameter
from yatt.records.media import Grid
from yatt.trainer.attention.media_batch import Picture


def build_tower(folder: str, shape: Shape, dtype: torch.dtype) -> nn.Module:
    """Builds the tower of a model folder, with random weights.

    Args:
        shape: of the folder's model.

    Raises:
        ConfigError: this version of transformers cannot build it.
    """
    from transformers import AutoConfig, AutoModel

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tower: nn.Module = AutoModel.from_config(
            config.vision_config, attn_implementation="sdpa", dtype=dtype
        )
        if isinstance(shape.vision, TiledVision):
            tower = TiledTower(tower, config, shape.vision).to(dtype)
    except Exception as error:  # a library and the user's files: any type
        raise ConfigError(
            f"model.path: transformers cannot build the tower of {folder}: {error_line(error)}"
        ) from error
    return tower.eval()


def train_part(tower: nn.Module, part: str) -> None:
    """Freezes a tower but for what `vision.train` names."""
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(trains_parameter(name, part))


class PictureFeatures:
    """Features of an iteration's pictures. By a tower that is not trained they are computed when a picture is
    added, and kept on the host; else patches are kept, and each pass computes them.

    Args:
        shape: of a model that takes pictures.
        device: of the tower.
    """

    def __init__(self, tower: nn.Module, scale: PixelScale, shape: Shape, device: torch.device) -> None:
        assert shape.vision is not None, "a model that takes pictures"
        self._tower, self._scale, self._device = tower, scale, device
        self._vision, self._width = shape.vision, shape.hidden_size
        self._kept: dict[Picture, list[Tensor]] = {}
        self._iteration = 0
        self._trained = [each for each in tower.parameters() if each.requires_grad]

    def begin_iteration(self, iteration: int) -> None:
        """Forgets the pictures of another iteration."""
        if iteration != self._iteration:
            self._iteration, self._kept = iteration, {}

    def add_picture(self, sha256: str, prepared: PreparedMedia) -> None:
        """Takes a picture for this iteration; of a video each pair of frames, as a picture of its own."""
        for number, part in enumerate(parts_of_prepared(prepared)):
            self._add(Picture(sha256, part.grid, number), part)

    def _add(self, picture: Picture, prepared: PreparedMedia) -> None:
        if picture in self._kept:
            return
        patches = torch.from_numpy(with_frames(prepared, self._vision.frames))
        if self._trained:
            self._kept[picture] = [patches]
            return
        with torch.no_grad():
            self._kept[picture] = [each.cpu() for each in self._computed(patches, [prepared.grid])]

    def share(self, pictures: Sequence[Picture], group: dist.ProcessGroup) -> None:
        """Broadcasts what is kept of pictures from the first rank of a group to the others. Collective.

        Args:
            pictures: in one order on every rank.
        """
        if group.size() == 1:
            return
        for picture in pictures:
            every = self._blank(picture.grid)
            if group.rank() == 0:
                every.copy_(torch.stack(self._kept[picture]))
            dist.broadcast(every, group_src=0, group=group)
            self._kept[picture] = list(every.cpu())

    def features_of(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """Returns [N, H] for the embeddings, then for each level, one picture after the other.

        Raises:
            WorkerFailed: a picture was not added.
        """
        if missing := next((each for each in pictures if each not in self._kept), None):
            raise WorkerFailed(f"the picture {missing.sha256} was not added before a pass that needs it")
        kept = [self._kept[picture] for picture in pictures]
        if self._trained:
            patches = torch.cat([own for (own,) in kept])
            return self._computed(patches, [picture.grid for picture in pictures])
        return [torch.cat(parts).to(self._device) for parts in zip(*kept, strict=True)]

    def untouched(self) -> Tensor | None:
        """Returns 0 as a function of all trained parameters, for a micro-batch without pictures, because
        data-parallel ranks wait for each parameter's gradient. None: nothing is trained."""
        if not self._trained or not torch.is_grad_enabled():
            return None
        return torch.stack([parameter.flatten()[0] * 0 for parameter in self._trained]).sum()

    def _blank(self, grid: Grid) -> Tensor:
        """What is kept of a picture of this size, as one tensor without values."""
        vision, patches = self._vision, math.prod(grid)
        if self._trained:
            columns = 3 * vision.frames * vision.patch_size**2
            return torch.empty(1, patches, columns, dtype=torch.uint8, device=self._device)
        size = 1 + len(vision.levels), patches // vision.merge_size**2, self._width
        return torch.empty(size, dtype=next(self._tower.parameters()).dtype, device=self._device)

    def _computed(self, patches: Tensor, grids: list[Grid]) -> list[Tensor]:
        pixels = normalised_pixels(patches.to(self._device), self._scale)
        return tower_features(self._tower, pixels.to(next(self._tower.parameters()).dtype), grids)


def normalised_pixels(patches: Tensor, scale: PixelScale) -> Tensor:
    """Returns patches float32 [P, 3 * frames * side * side] from bytes of that shape."""
    colours = patches.view(len(patches), 3, -1).float()
    mean, deviation = (
        torch.tensor(each, device=patches.device)[None, :, None] for each in (scale.mean, scale.deviation)
    )
    return ((colours * scale.factor - mean) / deviation).flatten(1)


def tower_features(tower: nn.Module, pixels: Tensor, grids: list[Grid]) -> list[Tensor]:
    """Returns the features [N, H] of pictures, then those of each level (DeepStack).

    Args:
        pixels: [P, 3 * frames * side * side], one picture after the other, in the processor's order.
    """
    found = tower(pixels, grid_thw=torch.tensor(grids, device=pixels.device))
    return [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]


class TowerOutput(NamedTuple):
    """As transformers' other towers call it: features [N, H]."""

    pooler_output: Tensor


class TiledTower(nn.Module):
    """Makes features of patches, as other towers of transformers do.

    Args:
        vit: transformers' `InternVLVisionModel`.
        config: transformers' config of the whole model.
    """

    def __init__(self, vit: nn.Module, config: Any, vision: TiledVision) -> None:
        super().__init__()
        from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

        self.vision_tower = vit
        self.multi_modal_projector = InternVLMultiModalProjector(config)
        self._vision = vision

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> TowerOutput:
        """Returns the features of pictures, in the order of their tiles.

        Args:
            pixels: [P, 3 * side * side], tile by tile, each row by row.
            grid_thw: of each picture, the number of tiles, and of patches in a tile's height and width.
        """
        vision, (_, height, width) = self._vision, grid_thw[0].tolist()
        side = vision.patch_size
        whole = pixels.view(-1, height, width, 3, side, side).permute(0, 3, 1, 4, 2, 5)
        tiles = whole.reshape(-1, 3, height * side, width * side)
        found = self.vision_tower(tiles).last_hidden_state[:, 1:]  # the first token is no patch
        merged = _merged_patches(found.view(-1, height, width, vision.hidden_size), vision.merge_size)
        return TowerOutput(self.multi_modal_projector(merged).flatten(0, 1))


def _merged_patches(found: Tensor, merge: int) -> Tensor:
    """From [A, height, width, size] to [A, height * width / merge**2, size * merge**2]: the patches of a
    token side by side (InternVL's pixel shuffle, arXiv:2404.16821, section 3.1)."""
    tiles, height, width, size = found.shape
    squares = found.view(tiles, height // merge, merge, width // merge, merge, size).transpose(2, 3)
    return squares.reshape(tiles, -1, size * merge**2)
