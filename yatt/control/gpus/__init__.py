"""The GPUs of one node: leases, memory checks, worker processes, engines, published weights."""
