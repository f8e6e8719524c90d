"""`yatt diagnose`: looks at a cluster, and says what a run will meet there."""
