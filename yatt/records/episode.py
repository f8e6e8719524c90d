"""A sample as a list of turns, from the engine to the loss.

The first turn is the prompt. Then turns of the policy and observations alternate; a run without an
environment has one turn of the policy. Arrays are raw bytes: token ids little-endian int32, log-probs
little-endian float32.
"""

import msgspec

ENVIRONMENT = "environment"
"""Name of the environment among the user's functions; no reward may have it."""

IMAGE_MARK = "<image>"
"""Stands in the text of a prompt for a picture."""

VIDEO_MARK = "<video>"
"""Stands in the text of a prompt for a video."""


class MediaRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A picture's file, or a video's. Only its reference travels.

    `path` is relative to `data.media_root`; empty: the file lies in `data.media_store`, by its digest.
    `sha256` is the file's digest in hex, `width` and `height` are the picture's pixels as it is shown.
    `num_frames` are those of a video, `fps` are its frames a second; 0: a picture.
    """

    path: str
    sha256: str
    width: int
    height: int
    num_frames: int = 0
    fps: float = 0.0

    @property
    def is_video(self) -> bool:
        """Whether it is a video."""
        return self.num_frames > 0


class PlacedMedia(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A picture in a turn, or one pair of a video's frames: the tokens `start` to `start + num_tokens` of the
    turn stand for it.

    `grid` is the number of patches in time, height and width. `prepared` is the digest of the prepared file
    on an engine's node; its controller fills it in for the engine. The file has `num_parts` pairs of frames,
    of which this is number `part`; a picture's has one part.
    """

    ref: MediaRef
    start: int
    num_tokens: int
    grid: tuple[int, int, int]
    prepared: str = ""
    part: int = 0
    num_parts: int = 1

    @property
    def file_grid(self) -> tuple[int, int, int]:
        """The grid of the whole prepared file."""
        return self.num_parts * self.grid[0], *self.grid[1:]


class Likeliest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A teacher's `count` likeliest tokens at the position of each of some tokens, the likeliest first.

    `ids` are int32 and `logprobs` float32, both packed [tokens, count]. `coef`: factor of the loss that is
    made of them.
    """

    count: int
    ids: bytes
    logprobs: bytes
    coef: float = 0.0

    def of_tokens(self, first: int, end: int) -> "Likeliest":
        """Those of some of the tokens."""
        cut = slice(4 * self.count * first, 4 * self.count * end)
        return msgspec.structs.replace(self, ids=self.ids[cut], logprobs=self.logprobs[cut])


class Turn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens of one turn. Only tokens that the policy sampled are trained on (`is_sampled`).

    `logprobs` are the sampler's, of each token of a sampled turn. `token_rewards` are added to the advantages
    of these tokens, float32; empty: none. `policy_versions` are spans (version, first
    token, end token) in the turn. `finish_reason` is '' until the policy has ended its turn. `likeliest` are
    the tokens that a teacher would rather have written.
    """

    token_ids: bytes
    is_sampled: bool = False
    logprobs: bytes = b""
    policy_versions: tuple[tuple[int, int, int], ...] = ()
    finish_reason: str = ""
    media: tuple[PlacedMedia, ...] = ()
    token_rewards: bytes = b""
    likeliest: Likeliest | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids) // 4

    @property
    def is_taught(self) -> bool:
        """Whether a teacher has said something about its tokens."""
        return bool(self.token_rewards) or self.likeliest is not None

    @property
    def size_bytes(self) -> int:
        """Bytes of token ids, log-probs, rewards of tokens, and a teacher's likeliest tokens."""
        taught = 0 if self.likeliest is None else len(self.likeliest.ids) + len(self.likeliest.logprobs)
        return len(self.token_ids) + len(self.logprobs) + len(self.token_rewards) + taught

    def shorter(self, num_tokens: int) -> "Turn":
        """This turn with its first `num_tokens` tokens only."""
        spans = tuple(
            (version, first, min(end, num_tokens))
            for version, first, end in self.policy_versions
            if first < num_tokens
        )
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[: 4 * num_tokens],
            logprobs=self.logprobs[: 4 * num_tokens],
            policy_versions=spans,
            token_rewards=self.token_rewards[: 4 * num_tokens],
            likeliest=self.likeliest and self.likeliest.of_tokens(0, num_tokens),
        )

    def longer(self, ids: bytes, logprobs: bytes, policy_version: int) -> "Turn":
        """This turn with more tokens, which `policy_version` sampled."""
        if not ids:
            return self
        span = (policy_version, self.num_tokens, self.num_tokens + len(ids) // 4)
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids + ids,
            logprobs=self.logprobs + logprobs,
            policy_versions=(*self.policy_versions, span),
        )


class Rollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sample to train on: its prompt and all later turns."""

    sample_id: int
    turns: tuple[Turn, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all turns."""
        return sum(turn.size_bytes for turn in self.turns)


class SampleFact(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Metadata of one sample, which every rank receives for all samples; a few bytes."""

    sample_id: int
    prompt_group: int
    reward: float
    num_prompt_tokens: int
    num_completion_tokens: int
    """Number of tokens that the policy sampled."""

    is_masked: bool = False
    """Whether only its reward is used, in its group's baseline, and its tokens are not trained on."""

    is_cut: bool = False
    """Whether it was cut by a limit of tokens."""

    num_observation_tokens: int = 0
    """Number of tokens between the policy's turns."""

    num_turns: int = 1
    """Number of the policy's turns."""

    @property
    def num_tokens(self) -> int:
        """Number of all tokens."""
        return self.num_prompt_tokens + self.num_completion_tokens + self.num_observation_tokens
