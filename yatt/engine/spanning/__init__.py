"""Engines whose GPUs are on several nodes."""
