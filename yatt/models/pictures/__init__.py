"""How models write pictures and videos into prompts: tokens, sizes, files of the processor."""
