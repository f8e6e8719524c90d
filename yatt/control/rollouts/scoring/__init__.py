"""Rewards and verdicts of completions."""
