"""New weights for an engine: published, compared, taken over."""
