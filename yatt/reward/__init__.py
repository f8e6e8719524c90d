"""The reward process: runs the user's own functions, apart from everything else."""
