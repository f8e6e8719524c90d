"""The model in megatron-core."""
