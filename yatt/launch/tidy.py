"""`python -m yatt.launch.tidy FOLDER...`: removes what dead processes of this user left in local folders.

Run by srun at the end of a Slurm job, on nodes whose step was killed: nobody is left there who could do it.
"""

import sys
from pathlib import Path

from yatt.control.gpus.scratch import sweep

if __name__ == "__main__":
    for folder in sweep(map(Path, sys.argv[1:])):
        sys.stdout.write(f"yatt: removed {folder}, which a killed process had left\n")
