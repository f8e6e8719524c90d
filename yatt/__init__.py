"""Reinforcement learning of language models with generative reward models, as Slurm batch jobs."""

__version__ = "0.1.0"
