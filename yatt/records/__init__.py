"""Messages and records of the processes: plain data without behaviour."""
