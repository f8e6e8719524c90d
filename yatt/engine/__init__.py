"""Engines that turn token ids into token ids, behind one protocol."""
