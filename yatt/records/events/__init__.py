"""Every kind of event of a run, with its fields: what `events.jsonl` has, one line each.

An event says what happened; nothing depends on it.
"""
