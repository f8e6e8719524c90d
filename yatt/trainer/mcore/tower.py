"""The tower of a model that takes pictures, which is transformers' own module, and the features of pictures.

Each picture passes the tower alone: what else is in a batch changes no bit of its features. Suffixes: P
patches of a picture, N tokens, H hidden size of the decoder.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from yatt.adapters.node_local.prepared_media import PreparedMedia, with_frames
from yatt.errors import ConfigError, WorkerFailed, error_line
from yatt.models.pictures.tokens import PixelScale
from yatt.trainer.attention.media_batch import Picture


def build_tower(folder: str, dtype: torch.dtype) -> nn.Module:
    """Builds the tower of a model folder, with random weights.

    Raises:
        ConfigError: this version of transformers cannot build it.
    """
    from transformers import AutoConfig, AutoModel

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tower: nn.Module = AutoModel.from_config(
            config.vision_config, attn_implementation="sdpa", dtype=dtype
        )
    except Exception as error:  # a library and the user's files: any type
        raise ConfigError(
            f"model.path: transformers cannot build the tower of {folder}: {error_line(error)}"
        ) from error
    return tower.eval()


class PictureFeatures:
    """Features of pictures by a tower that is not trained: computed when a picture is added, and kept on the
    host until others replace them.

    Args:
        frames: `temporal_patch_size`: how often a still picture's frame is repeated.
        device: of the tower.
    """

    def __init__(self, tower: nn.Module, scale: PixelScale, frames: int, device: torch.device) -> None:
        self._tower, self._scale, self._frames, self._device = tower, scale, frames, device
        self._kept: dict[Picture, list[Tensor]] = {}
        self._iteration = 0

    def begin_iteration(self, iteration: int) -> None:
        """Forgets the features of another iteration."""
        if iteration != self._iteration:
            self._iteration, self._kept = iteration, {}

    def add_picture(self, sha256: str, prepared: PreparedMedia) -> None:
        """Computes a picture's features."""
        picture = Picture(sha256, prepared.grid)
        if picture in self._kept:
            return
        with torch.no_grad():
            features = tower_features(self._tower, self._pixels(prepared), prepared.grid)
        self._kept[picture] = [each.cpu() for each in features]

    def features_of(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """Returns [N, H] for the embeddings, then for each level, one picture after the other.

        Raises:
            WorkerFailed: one was not added.
        """
        if missing := next((each for each in pictures if each not in self._kept), None):
            raise WorkerFailed(f"the picture {missing.sha256} was not added before a pass that needs it")
        each = (self._kept[picture] for picture in pictures)
        return [torch.cat(parts).to(self._device) for parts in zip(*each, strict=True)]

    def share(
        self, pictures: Mapping[Picture, int], group: dist.ProcessGroup, width: int, num_levels: int
    ) -> None:
        """Broadcasts features from the first rank of a group to the others. Collective.

        Args:
            pictures: tokens of each; in one order on every rank.
            width: elements of a feature.
            num_levels: of DeepStack.
        """
        if group.size() == 1:
            return
        dtype = next(self._tower.parameters()).dtype
        for picture, num_tokens in pictures.items():
            shape = (1 + num_levels, num_tokens, width)
            if group.rank() == 0:
                every = torch.stack(self._kept[picture]).to(self._device)
            else:
                every = torch.empty(shape, dtype=dtype, device=self._device)
            dist.broadcast(every, group_src=0, group=group)
            self._kept[picture] = list(every.cpu())

    def _pixels(self, prepared: PreparedMedia) -> Tensor:
        values = torch.from_numpy(with_frames(prepared, self._frames)).to(self._device)
        return normalised_pixels(values, self._scale).to(next(self._tower.parameters()).dtype)


def normalised_pixels(patches: Tensor, scale: PixelScale) -> Tensor:
    """Returns patches float32 [P, 3 * frames * side * side] from bytes of that shape."""
    colours = patches.view(len(patches), 3, -1).float()
    mean, deviation = (
        torch.tensor(each, device=patches.device)[None, :, None] for each in (scale.mean, scale.deviation)
    )
    return ((colours * scale.factor - mean) / deviation).flatten(1)


def tower_features(tower: nn.Module, pixels: Tensor, grid: tuple[int, int, int]) -> list[Tensor]:
    """Returns one picture's features [N, H], then those of each level (DeepStack).

    Args:
        pixels: [P, 3 * frames * side * side], in the processor's order.
    """
    found = tower(pixels, grid_thw=torch.tensor([grid], device=pixels.device))
    return [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
