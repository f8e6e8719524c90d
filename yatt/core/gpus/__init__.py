"""Rules about GPUs: placement, leases, moves between roles, predicted times. Pure."""
