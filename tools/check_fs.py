"""Checks and measures a shared filesystem before a run uses it.

    python tools/check_fs.py FOLDER                                       between processes of this machine
    srun -N2 --ntasks-per-node=1 python tools/check_fs.py FOLDER          between nodes

Prints a table, and one line for the site file. Exit code 2: a run must not use this filesystem.
"""

import sys

from yatt.launch.diagnose.check_fs import main

if __name__ == "__main__":
    sys.exit(main())
