"""Trainer ranks that follow a script instead of training a model."""
