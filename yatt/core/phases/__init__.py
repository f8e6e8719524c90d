"""Rules about the phases of an iteration, and about saving. Pure."""
