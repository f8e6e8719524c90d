"""`python -m yatt.launch.node.tidy FOLDER...`: removes what dead processes of this user left in local
folders.

Run by srun at the end of a Slurm job, on nodes whose step was killed: nobody is left there who could do it.
"""

import sys
from pathlib import Path

from yatt.control.gpus.processes.scratch import remove_folders_of_the_dead

if __name__ == "__main__":
    for folder in remove_folders_of_the_dead(map(Path, sys.argv[1:])):
        sys.stdout.write(f"yatt: removed {folder}, which a killed process had left\n")
