"""Slurm's commands, and what yatt notes about its jobs."""
