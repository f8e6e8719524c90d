"""Arguments of commands whose work imports much."""
