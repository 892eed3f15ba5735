"""What is shipped beside the code: units, container file, formula, metadata, forms."""

import configparser
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from keepwarm.config import Settings

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
URL = "https://code.example.org/team/keepwarm"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def drain_s() -> float:
    return next(field.default for field in fields(Settings) if field.name == "drain_s")


@pytest.mark.parametrize("name", ["keepwarm.service", "keepwarm-user.service"])
def test_a_unit_leaves_time_to_drain(name):
    unit = configparser.RawConfigParser(strict=False, comment_prefixes="#")
    unit.optionxform = str  # type: ignore[assignment]
    unit.read_string((DEPLOY / name).read_text())
    assert unit["Service"]["ExecStart"].endswith("/keepwarm serve")
    assert float(unit["Service"]["TimeoutStopSec"]) > drain_s()
    assert unit["Service"]["Restart"] == "on-failure"


def test_the_launch_agent_is_a_property_list():
    agent = plistlib.loads((DEPLOY / "local.keepwarm.plist").read_bytes())
    assert agent["Label"] == "local.keepwarm"
    assert '/keepwarm" serve' in agent["ProgramArguments"][-1]
    assert agent["ExitTimeOut"] > drain_s()
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["Umask"] == 0o077


def instructions() -> list[tuple[str, str]]:
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    return [(w[0], w[1]) for w in (line.split(maxsplit=1) for line in lines) if w and w[0] != "#"]


def test_the_container_copies_what_make_needs():
    """All that `make install` reads, and nothing that is not there."""
    copied = [path for name, text in instructions() if name == "COPY" for path in text.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    said = subprocess.run(
        ["make", "-n", "install", "BACKEND=cpu", "VENV=elsewhere", "PYTHON=python3"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    needed = {word for word in shlex.split(said) if (ROOT / word).is_file()}
    needed |= {"pyproject.toml", "README.md", "LICENSE", "src"}  # of the build
    assert {"requirements.lock", "deploy/pip_progress.py"} <= needed
    assert needed <= {*copied, "Makefile"}
    assert ("RUN", "make install BACKEND=cpu && rm -rf ~/.cache") in instructions()


def test_the_container_sets_settings():
    (environ,) = (text for name, text in instructions() if name == "ENV")
    names = {word.partition("=")[0] for word in environ.split()}
    known = {f"KEEPWARM_{field.name.upper()}" for field in fields(Settings)}
    assert names <= known


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """The project as the release workflow prepares it."""
    for folder in (".ci", "deploy"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "pyproject.toml", "docs/quickstart.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    program = tmp_path / ".ci" / "absolute_links.py"
    subprocess.run([sys.executable, program, f"{URL}/", "v1.2.3"], check=True)
    return tmp_path


def test_a_release_has_absolute_links(released):
    before, after = (LINK.findall((p / "README.md").read_text()) for p in (ROOT, released))
    assert len(before) == len(after)
    assert all(link.startswith(("https://", "#")) for link in after)
    for old, new in zip(before, after, strict=True):
        if not old.startswith(("http", "#")):
            kind, _, path = new.removeprefix(f"{URL}/").partition("/v1.2.3/")
            assert (kind, path) == (
                "raw" if old.endswith((".png", ".svg", ".webp")) else "blob",
                old,
            )
    urls = tomllib.loads((released / "pyproject.toml").read_text())["project"]["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(URL) for url in urls.values())
    formula = (released / "deploy" / "keepwarm.rb").read_text()
    assert f'homepage "{URL}"' in formula
    assert 'https://REPOSITORY"' not in formula
    assert f"git clone {URL} keepwarm" in (released / "docs" / "quickstart.md").read_text()


def test_a_release_is_published_by_a_tag_after_it_was_tried():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    jobs = workflow["jobs"]
    assert jobs["publish"]["needs"] == "build"
    steps = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert ".venv/bin/python .ci/install.py dist" in steps
    assert "secrets." not in text
