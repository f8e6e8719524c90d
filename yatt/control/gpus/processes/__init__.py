"""A node's worker processes and their environment."""
