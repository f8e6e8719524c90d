"""What both sides of the GRPO comparison share; imports nothing heavy, and is yatt's reward file too."""

from dataclasses import dataclass

NUM_PROMPTS, GROUP = 4, 8
ITERATIONS, WARM_UP = 12, 3
THREADS = 2
LR = 1e-5


@dataclass(frozen=True)
class Case:
    """One shape: a model, and how many tokens a completion has."""

    name: str
    hidden_size: int
    layers: int
    num_tokens: int


CASES = (Case("small", 128, 2, 32), Case("medium", 256, 6, 64))


def digit_share(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """A reward that differs between completions of any model: the share of digits."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
