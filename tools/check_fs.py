"""Measures a shared filesystem before a run is trusted to it.

    python tools/check_fs.py FOLDER                                       processes of this machine
    srun -N2 --ntasks-per-node=1 python tools/check_fs.py FOLDER          nodes among each other

Prints a table, and one line to keep in the site file. Exit code 2: a run must not use this filesystem.
"""

import sys

from yatt.launch.diagnose.check_fs import main

if __name__ == "__main__":
    sys.exit(main())
