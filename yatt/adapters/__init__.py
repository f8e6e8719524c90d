"""The outside world, one module a door: files, objects, sockets, processes, memory."""
