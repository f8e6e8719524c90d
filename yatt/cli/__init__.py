"""The yatt command."""
