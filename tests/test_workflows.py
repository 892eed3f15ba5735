"""The workflows of the public CI: linted here, because they cannot be run here."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"


def test_a_linter_finds_nothing():
    command = [Path(sys.executable).parent / "zizmor", "--offline", "--no-progress"]
    run = subprocess.run([*command, ROOT / ".github"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_suite_runs_on_every_system_and_on_the_oldest_and_newest_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    said.sort(key=lambda version: int(version.split(".")[1]))
    jobs = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())["jobs"]
    assert jobs["linux"]["strategy"]["matrix"]["machine"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert jobs["macos"]["runs-on"].startswith("macos-")
    for name in ("linux", "macos"):
        assert jobs[name]["strategy"]["matrix"]["python"] == [said[0], said[-1]]
        assert ".ci/run" in [step.get("run") for step in jobs[name]["steps"]]
    assert project["requires-python"] == f">={said[0]}"


def test_the_long_tests_run_every_night():
    workflow = yaml.safe_load((WORKFLOWS / "soak.yml").read_text())
    (when,) = workflow[True]["schedule"]  # YAML reads the word `on` as true
    assert re.fullmatch(r"\d+ \d+ \* \* \*", when["cron"])
    (job,) = workflow["jobs"].values()
    assert ".ci/run soak" in [step.get("run") for step in job["steps"]]
    assert "make soak" in (ROOT / ".ci" / "run").read_text()
