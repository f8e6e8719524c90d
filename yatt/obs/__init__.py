"""What a run shows: events, metrics, terminal, report, wandb."""
