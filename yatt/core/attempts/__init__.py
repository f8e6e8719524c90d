"""Rules about starts of a run: claims, exit codes, restarts, what a lost process means. Pure."""
