"""Ways of judging, one a module: see `yatt.judging.protocol`."""
