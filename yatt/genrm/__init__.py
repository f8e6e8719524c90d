"""A GenRM engine process."""
