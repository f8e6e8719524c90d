"""What a cluster and this machine mean for a job of ours: pure functions of what they say of themselves."""
