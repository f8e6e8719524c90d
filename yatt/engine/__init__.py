"""Inference engines with one protocol; input and output are token ids."""
