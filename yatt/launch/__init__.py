"""Starting a run: local processes, later Slurm."""
