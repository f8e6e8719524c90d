"""The sections of the config, and the ranges of their values."""
