"""Forward passes, and the log-probabilities they give."""
