"""Commits of checkpoints, and where a start continues."""
