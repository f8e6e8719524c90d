"""Backends that run attempts: on this machine, or in a Slurm job."""
