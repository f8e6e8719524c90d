"""Manifests, shards and the commit of a checkpoint."""
