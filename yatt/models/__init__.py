"""Model families: what a config.json means, and the weights it promises. No torch, no megatron."""
