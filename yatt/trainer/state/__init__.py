"""The state of the trainer: copies on the host, snapshots, exports, published weights."""
