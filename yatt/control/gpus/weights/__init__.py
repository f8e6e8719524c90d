"""A node's weights: fetched, kept, handed to its engines."""
