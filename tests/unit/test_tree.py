"""Files of the project as they are committed."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_file_has_the_marks_of_an_unfinished_merge() -> None:
    marks = ["-e", "^<<<<<<< ", "-e", "^>>>>>>> "]
    found = subprocess.run(
        ["git", "-C", str(ROOT), "grep", "-lIE", *marks], capture_output=True, text=True, check=False
    )
    assert found.returncode == 1, f"{found.stdout}{found.stderr}"
