"""The update of the policy."""
