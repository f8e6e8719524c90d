"""What both sides of the GRPO comparison share; imports nothing heavy, and is yatt's reward file too."""

NUM_PROMPTS, GROUP, NUM_TOKENS = 4, 8, 64
ITERATIONS, WARM_UP = 12, 3
THREADS = 2
LR = 1e-5


def digit_share(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """A reward that differs between completions of any model: the share of digits."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
