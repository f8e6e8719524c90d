"""Checkpoints: the whole state of a run, sharded, committed by a manifest."""
