"""A rollout engine process."""
