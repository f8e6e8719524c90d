"""What both sides of the GRPO comparison share; imports nothing heavy, and is yatt's reward file too."""

from dataclasses import dataclass

GROUP = 8
WARM_UP = 3
THREADS = 2
LR = 1e-5


@dataclass(frozen=True)
class Case:
    """One shape: a model, prompts a step, and how many tokens a completion has.

    With `num_eos` 0 every completion has `num_tokens`; else at most `num_tokens`, and `num_eos` tokens of the
    vocabulary end one beside the tokenizer's own. TRL's forward passes take `trl_batch` completions each.
    """

    name: str
    hidden_size: int
    layers: int
    num_prompts: int
    num_tokens: int
    trl_batch: int
    iterations: int
    num_eos: int = 0

    @property
    def num_completions(self) -> int:
        return self.num_prompts * GROUP

    @property
    def eos_ids(self) -> list[int]:
        """Beside the tokenizer's own."""
        return list(range(FIRST_EOS, FIRST_EOS + self.num_eos))


FIRST_EOS = 300
CASES = (
    Case("small", 128, 2, num_prompts=4, num_tokens=32, trl_batch=32, iterations=12),
    Case("medium", 256, 6, num_prompts=4, num_tokens=64, trl_batch=32, iterations=12),
    Case("long", 256, 6, num_prompts=8, num_tokens=256, num_eos=4, trl_batch=8, iterations=9),
)


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def digit_share(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """A reward that differs between completions of any model: the share of digits."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
