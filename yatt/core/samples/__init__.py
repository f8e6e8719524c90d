"""Rules about prompts, completions and their scores. Pure."""
