"""The run file: YAML to frozen dataclasses."""
