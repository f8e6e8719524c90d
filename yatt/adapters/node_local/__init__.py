"""A node's own disk and shared memory."""
