"""The outside world, one module a door: files, sockets, processes, Slurm, memory."""
