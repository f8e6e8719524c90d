"""What this machine has: memory, GPUs, cores, open files."""
