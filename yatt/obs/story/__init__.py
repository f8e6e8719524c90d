"""What the events of a run mean: its state, its history, its account."""
