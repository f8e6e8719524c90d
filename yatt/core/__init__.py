"""Decisions as pure functions of values: no torch, no I/O, no clock."""
