"""Whole state of a run, sharded, committed by manifest."""
