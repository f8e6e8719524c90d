"""Starting, continuing and stopping runs, on this machine and by Slurm."""
