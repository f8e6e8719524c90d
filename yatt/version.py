"""The version of yatt."""

__version__ = "0.1.0"
