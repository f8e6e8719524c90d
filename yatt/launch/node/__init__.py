"""What runs on each node before and beside its controller."""
