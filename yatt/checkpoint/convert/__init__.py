"""Checkpoints from and to folders of Hugging Face, and copies."""
