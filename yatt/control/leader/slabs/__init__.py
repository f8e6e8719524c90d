"""The leader's decisions about GPU sets."""
