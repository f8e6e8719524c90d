"""Converts weights between Hugging Face and megatron-core."""
