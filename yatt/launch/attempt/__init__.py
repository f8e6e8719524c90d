"""One attempt of a run: its processes are started, watched and judged."""
