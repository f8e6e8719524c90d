"""Hugging Face names and megatron-core names, one table, both ways."""
