"""The leader: drives the iterations from metadata."""
