"""Options of sbatch that a site file hands on, variables for the nodes, and a script of the site's own."""

from pathlib import Path

import pytest

from tests.unit.launch.test_findings import site
from yatt.config.load import resolved_text
from yatt.config.sections.sbatch import FIXED, OWN_KEYS
from yatt.config.site import SiteConfig, load_site, with_settings
from yatt.errors import ConfigError
from yatt.launch.commands.executor import template_of
from yatt.launch.resolve.asking import more_options

BOTH = """
sbatch_args: {reservation: course, exclude: "n[1-2]", mail-type: END, reboot: true, nice: 100}
components:
  engines: {sbatch_args: {reservation: other, licenses: "a:2", exclude: ""}}
"""


def test_a_component_has_the_sites_options_and_its_own(tmp_path):
    found = site(tmp_path, BOTH)
    assert more_options(found, "trainer", is_leader=True) == {
        "reservation": "course", "exclude": "n[1-2]", "mail-type": "END", "reboot": None, "nice": "100",
    }  # fmt: skip
    assert more_options(found, "engines", is_leader=False) == {
        "reservation": "other", "reboot": None, "licenses": "a:2",
    }  # fmt: skip


@pytest.mark.parametrize("name", [*OWN_KEYS, *FIXED])
def test_what_yatt_sets_is_not_handed_on(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"sbatch_args.{name}: (use the key|cannot be changed)"):
        site(tmp_path, f"sbatch_args: {{{name}: x}}")
    with pytest.raises(ConfigError, match=rf"components.engines.sbatch_args.{name}"):
        site(tmp_path, f"components: {{engines: {{sbatch_args: {{{name}: x}}}}}}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sbatch_args: {--reservation: x}", "write the name without dashes: reservation"),
        ("sbatch_args: {parti: x}", "sbatch would read it as --partition"),
        ("sbatch_args: {no-k: true}", "sbatch would read it as --no-kill"),
        ("sbatch_args: {Reservation: x}", "this is not a long option of sbatch"),
        ('sbatch_args: {reservation: "x\\n#SBATCH --uid=0"}', "a line break"),
        ("sbatch_args: {reboot: false}", "remove the option"),
        ("sbatch_args: {reservation: [a]}", "sbatch_args.reservation"),
        ("env: {NOT-A-NAME: x}", "this is not a valid variable name"),
        ("env: {SLURM_JOB_ID: x}", "Slurm or yatt sets this variable"),
        ("env: {CUDA_VISIBLE_DEVICES: x}", "Slurm or yatt sets this variable"),
        ("env: {NCCL_DEBUG: true}", "is not text"),
        ("template: job.sh", "is relative"),
    ],
)
def test_what_cannot_be_handed_on_is_said(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        site(tmp_path, text)


def test_site_values_can_be_overridden_for_a_submission(tmp_path):
    (tmp_path / "site.yaml").write_text(f"partition: gpu\n{BOTH}")
    before = load_site(tmp_path / "site.yaml")
    changed = with_settings(before, ["partition=debug", "time_limit_min=30", "sbatch_args.reservation="])
    assert (changed.partition, changed.time_limit_min, changed.components) == ("debug", 30, before.components)
    assert "reservation" not in more_options(changed, "trainer", is_leader=True)
    assert with_settings(before, []) is before
    assert with_settings(SiteConfig(), ["partition=x"]) == SiteConfig(partition="x")
    assert resolved_text(with_settings(before, [f"partition={before.partition}"])) == resolved_text(before)
    with pytest.raises(ConfigError, match="time_limit_min"):
        with_settings(before, ["time_limit_min=soon"])
    with pytest.raises(ConfigError, match="Did you mean 'partition'"):
        with_settings(before, ["partitions=x"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("#!/bin/bash\n@DIRECTIVES@\n", "has 0 lines @COMMAND@"),
        ("#!/bin/bash\n@DIRECTIVES@\n@DIRECTIVES@\n@COMMAND@\n", "has 2 lines @DIRECTIVES@"),
        ("@DIRECTIVES@\n@COMMAND@\n", "does not begin with #!"),
        (
            "#!/bin/bash\nmodule load x\n@DIRECTIVES@\n@COMMAND@\n",
            "has the command 'module load x' before @DIRECTIVES@",
        ),
    ],
)
def test_a_template_without_room_for_our_lines_is_refused(tmp_path: Path, text, says):
    (tmp_path / "job.sh").write_text(text)
    with pytest.raises(ConfigError, match=says):
        template_of(SiteConfig(template=str(tmp_path / "job.sh")))
    with pytest.raises(ConfigError, match="cannot be read"):
        template_of(SiteConfig(template=str(tmp_path / "none.sh")))
