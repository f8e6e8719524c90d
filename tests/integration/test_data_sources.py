"""A run whose prompts come from several files with weights, through the user's function over rows."""

import gzip
import json
from collections import Counter
from pathlib import Path

from tests.runs import RunFile, yatt

MAP = """
def map_row(row):
    return None if row["number"] == 0 else {"prompt": f"{row['text']} number {row['number']} is"}
"""


def test_a_run_has_each_source_as_often_as_its_weight_says(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, count in (("often", 5), ("never", 7), ("half", 9)):
        rows = [{"text": name, "number": number} for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.py").write_text(MAP)
    files = [str(folder / f"{name}.jsonl") for name in ("often", "never")] + [f"{folder}/h*.jsonl"]
    run = RunFile(
        tmp_path / "run",
        {
            "data": {
                "train_files": files, "map": str(tmp_path / "rows.py"),
                "weights": {files[0]: 2.0, files[1]: 0.0, files[2]: 0.5},
            },
            "logging": {"rollouts": "all"},
            "trainer": {"total_iterations": 3},
            "launch": {"nodes": 1},
        },
    )  # fmt: skip
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    prompts: Counter[str] = Counter()
    for iteration in (1, 2, 3):  # 12 prompts: 2 * 4 + 0.5 * 8, one data epoch
        (path,) = (run.run_dir / "rollouts").glob(f"{iteration:06d}.*.jsonl.gz")
        lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        groups = {(s["group"], s["prompt"]) for s in lines if s["kind"] == "sample"}
        prompts.update(prompt for _, prompt in groups)
    assert sum(prompts.values()) == 12, prompts
    assert {p for p in prompts if p.startswith("often")} == {f"often number {n} is" for n in range(1, 5)}
    assert all(prompts[p] == 2 for p in prompts if p.startswith("often"))
    assert len([p for p in prompts if p.startswith("half")]) == 4 and not any(
        p.startswith("never") for p in prompts
    )
    made = sorted(path.name.rpartition("-")[0] for path in Path(f"{run.run_dir}.data").iterdir())
    assert made == ["mapped-half", "mapped-never", "mapped-often"]
    again = yatt("run", str(run.folder / "run.yaml"))
    assert again.returncode == 0 and "making" not in again.stderr, "the run file still means this run"
