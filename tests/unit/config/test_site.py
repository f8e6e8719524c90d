"""What a person sees when the site file is wrong, and what the examples in the repository say."""

from pathlib import Path

import pytest

from yatt.config.site import load_site, site_component
from yatt.errors import ConfigError

EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "configs" / "sites").glob("*.yaml"))


def loaded(folder: Path, text: str):
    path = folder / "site.yaml"
    path.write_text(text)
    return load_site(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_loads(path: Path) -> None:
    load_site(path)


def test_the_example_names_every_key() -> None:
    from dataclasses import fields

    from yatt.config.site import SiteConfig

    text = next(p for p in EXAMPLES if p.name == "example.yaml").read_text()
    missing = [f.name for f in fields(SiteConfig) if f"\n{f.name}:" not in f"\n{text}"]
    assert missing == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("partiton: gpu", "partiton: no such key. Did you mean 'partition'?"),
        ("partition: a b", "'a b' contains a blank"),
        (
            'account: "a\\n#SBATCH --x"',
            "'a\\n#SBATCH --x' contains a line break or another control character",
        ),
        ("mem_gb: -1", "mem_gb is -1; write 0 or more"),
        ("time_limit_min: 5\nsignal_lead_s: 300", "time_limit_min: 5 min leaves no time to work"),
        ("time_limit_min: 5\nsignal_lead_s: 300", "write 7 or more"),
        ("time_limit_min: 0", "time_limit_min: 0 min leaves no time to work"),
        ("signal_lead_s: 70000", "write 1 to 65535"),
        ("signal_lead_s: 0", "write 1 to 65535"),
        ("gpus_directive: none\ngpu_type: h100", "gpu_type: gpus_directive: none requests no GPUs"),
        (
            "components: {genrm: {qos: a}}",
            "components.genrm: no such component; write one of trainer, engines",
        ),
        ("layout: flat\ncomponents: {engines: {partition: b}}", "a flat job has one partition"),
        ("scratch_dir: tmp", "'tmp' is relative"),
        ("checkpoint_url_prefix: bucket", "neither a URL"),
        ('setup: ["#SBATCH --mem=0"]', "setup[0]: Slurm ignores #SBATCH in these lines"),
        ("container: {runtime: pyxis}", "write both, or neither"),
        ("container: {image: a.sif}", "write both, or neither"),
        (
            'container: {runtime: pyxis, image: a, mounts: ["data:/data"]}',
            "'data:/data' is not SOURCE:TARGET",
        ),
        ("time_limit_min: 12:30:00", "not a whole number"),
    ],
)
def test_a_mistake_is_named_with_its_cure(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_component_asks_for_its_own_or_what_the_site_says(tmp_path: Path) -> None:
    site = loaded(
        tmp_path,
        "partition: a\nmem_gb: 5\nconstraint: ib\ncomponents: {engines: {partition: b, nodelist: 'n[1-2]'}}",
    )
    engines, trainer = site_component(site, "engines"), site_component(site, "trainer")
    assert (engines.partition, engines.mem_gb, engines.constraint, engines.nodelist) == (
        "b",
        5,
        "ib",
        "n[1-2]",
    )
    assert (trainer.partition, trainer.nodelist) == ("a", "")
