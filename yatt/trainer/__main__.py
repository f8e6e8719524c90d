"""`python -m yatt.trainer`: one trainer rank."""

import sys

from yatt import clock
from yatt.adapters.files.patience import exit_code_of
from yatt.errors import YattError
from yatt.trainer.main import main

if __name__ == "__main__":
    try:
        main()
    except YattError as error:
        sys.stderr.write(f"{clock.wall_iso()} ERROR trainer: {error}\n")
        sys.exit(exit_code_of(error))
