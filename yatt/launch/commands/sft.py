"""`yatt sft`: checks the file, then trains in a separate process; once for the same inputs."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from yatt.adapters.files.files import write_atomically
from yatt.config.load import load_as, resolved_text
from yatt.config.sections.sft import SftConfig, sft_rules

MADE_FROM = "yatt-sft.sha256"


def run_sft(file: Path, more: list[str]) -> int:
    """Trains, unless `output` was made from the same file and data; returns the exit code.

    Raises:
        ConfigError: the SFT file has a mistake; nothing was started.
    """
    overlays = [Path(part) for part in more if "=" not in part]
    settings = [part for part in more if "=" in part]
    config = load_as(SftConfig, [file, *overlays], settings, sft_rules)
    output = Path(config.output)
    digest = _digest(config)
    if (output / MADE_FROM).is_file() and (output / MADE_FROM).read_text() == digest:
        sys.stdout.write(f"{output} already exists and was made from the same file and data: nothing to do\n")
        return 0
    output.mkdir(parents=True, exist_ok=True)
    (output / MADE_FROM).unlink(missing_ok=True)
    write_atomically(output / "sft.yaml", resolved_text(config).encode())
    # Transformers and megatron warn that Transformer Engine and Apex are not installed.
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    argv = [sys.executable, "-P", "-m", "yatt.trainer.sft_main", str(output / "sft.yaml")]
    exit_code = subprocess.run(argv, check=False, env=env).returncode
    if exit_code == 0:
        write_atomically(output / MADE_FROM, digest.encode())
    return exit_code


def _digest(config: SftConfig) -> str:
    """Returns the SHA-256 of all inputs of the model."""
    parts = [resolved_text(config).encode(), Path(config.train_file).read_bytes()]
    if config.start:
        parts += [path.read_bytes() for path in sorted(Path(config.start).glob("*.safetensors"))]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
