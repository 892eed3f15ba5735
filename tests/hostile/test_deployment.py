"""What is installed and built is what was looked at; logs are their owner's."""

import plistlib
import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
COMMIT = re.compile(r"[\w./-]+@[0-9a-f]{40}( # v[\d.]+)?")
DIGEST = re.compile(r"\S+:\S+@sha256:[0-9a-f]{64}")


def test_actions_are_named_by_their_commit():
    lines = [
        line.partition("uses:")[2].strip()
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    assert lines
    assert [line for line in lines if not COMMIT.fullmatch(line)] == []


def test_images_are_named_by_their_digest():
    bases = re.findall(r"^FROM (\S+)", (ROOT / "deploy/Containerfile").read_text(), re.MULTILINE)
    services = yaml.safe_load((ROOT / "examples/fleet/compose.yaml").read_text())["services"]
    images = {service["image"] for service in services.values()} - {"keepwarm"}  # built here
    assert len(bases) == 1
    assert len(images) == 2
    assert [image for image in (*bases, *images) if not DIGEST.fullmatch(image)] == []


def test_the_launch_agents_log_is_in_its_owners_folder():
    agent = plistlib.loads((ROOT / "deploy" / "local.keepwarm.plist").read_bytes())
    paths = [value for name, value in agent.items() if name.startswith("Standard")]
    assert not paths  # launchd opens them before it knows a home directory
    assert agent["ProgramArguments"][-1].endswith('2>>"$HOME/Library/Logs/keepwarm.log"')
    assert agent["Umask"] == 0o077


def test_jinja_is_one_whose_sandbox_has_no_known_hole():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (jinja,) = (
        found for each in project["dependencies"] if (found := Requirement(each)).name == "jinja2"
    )
    assert not jinja.specifier.contains("3.1.5")
    assert jinja.specifier.contains("3.1.6")
