"""A trainer rank: megatron-core behind a command loop."""
