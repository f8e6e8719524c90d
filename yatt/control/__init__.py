"""The controller of a node: arbiter, supervisor, data shard, peers; on node 0 the coordinator."""
