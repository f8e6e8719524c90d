"""The reward process, which isolates the user's own functions from all other processes."""
