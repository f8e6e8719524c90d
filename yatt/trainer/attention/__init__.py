"""Sequences packed into micro-batches, and attention over them."""
