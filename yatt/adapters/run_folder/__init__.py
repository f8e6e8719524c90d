"""The records that a run keeps in its folder."""
