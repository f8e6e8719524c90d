"""The uploader process of a trainer node: writes snapshots to the checkpoint store. No torch."""
