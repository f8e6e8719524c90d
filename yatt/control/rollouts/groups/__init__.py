"""Groups of completions of one prompt: where they come from, and where they are kept."""
