"""The members of an attempt: rendezvous, liveness, connections to other controllers, dead-man's switch."""
