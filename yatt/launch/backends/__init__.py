"""Where attempts run: on this machine, or in a job of Slurm's."""
