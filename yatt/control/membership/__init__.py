"""Who takes part in an attempt: meeting, liveness, connections to other controllers, dead-man's switch."""
