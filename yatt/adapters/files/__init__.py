"""Files on shared folders: whole writes, lines, locks, retries."""
