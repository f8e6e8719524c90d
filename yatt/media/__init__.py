"""The media process: fetches, decodes, prepares and keeps pictures for the workers of a node."""
