"""Bytes of memory per GPU and node, and seconds, that a run will need. Pure, without torch."""
