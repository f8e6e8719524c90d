"""Runs simulated: the policy and the router of real runs, on models of engines and a clock that jumps."""
