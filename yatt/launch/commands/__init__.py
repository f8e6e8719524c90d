"""What the commands of `yatt` do."""
