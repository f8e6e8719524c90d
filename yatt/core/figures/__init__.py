"""Rules about figures of a run: alarms, useful time, limits. Pure."""
