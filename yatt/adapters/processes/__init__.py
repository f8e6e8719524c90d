"""Processes of this machine: starting, ending, forking, their logs and stacks."""
