"""Saves that are first written to a node's own disk."""
