"""A run's folder, and its jobs."""
