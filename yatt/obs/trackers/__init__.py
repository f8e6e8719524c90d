"""Trackers: programs of others that show a run's metrics. Each one has a follower process beside the run."""
