"""What torch.distributed needs from a run: a store with the run's keys, exchanges without pickle."""
