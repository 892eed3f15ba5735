"""What `make` does by itself, and what a test run promises about skips."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NVIDIA = "GPU 0: NVIDIA H100 (UUID: GPU-0)"

needs_make = pytest.mark.skipif(not shutil.which("make"), reason="needs `make`")

# What a make around this test would hand on.
MADE_BY_MAKE = {"ARGS", "BACKEND", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS"}


def program(folder: Path, name: str, output: str, status: int = 0) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\nexit {status}\n")
    path.chmod(0o755)


def make(*arguments: str, path: Path | None = None, cwd: Path = ROOT) -> str:
    """Run the real make, with these programs found before the machine's own."""
    environment = {k: v for k, v in os.environ.items() if k not in MADE_BY_MAKE}
    environment["PATH"] = f"{path}:{environment['PATH']}" if path else environment["PATH"]
    command = ["make", "--no-print-directory", *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@needs_make
@pytest.mark.parametrize(
    ("system", "gpus", "status", "expected"),
    [
        ("Darwin", "", 1, "metal"),
        ("Darwin", NVIDIA, 0, "metal"),
        ("Linux", NVIDIA, 0, "cuda"),
        ("Linux", "", 0, "cpu"),
        ("Linux", "NVIDIA-SMI has failed", 9, "cpu"),
    ],
)
def test_the_backend_is_chosen_by_the_machine(tmp_path, system, gpus, status, expected):
    program(tmp_path, "uname", system)
    program(tmp_path, "nvidia-smi", gpus, status)
    assert make("backend", path=tmp_path) == expected


@needs_make
@pytest.mark.parametrize("backend", ["cpu", "cuda", "metal"])
def test_the_backend_can_be_named(tmp_path, backend):
    program(tmp_path, "nvidia-smi", NVIDIA)
    assert make("backend", f"BACKEND={backend}", path=tmp_path) == backend


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the Makefile beside an environment that is installed for `cpu`."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("", "-cuda", "-tools"):
        (tmp_path / f"requirements{name}.lock").touch()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.ready-cpu").touch()
    (tmp_path / ".venv/.ready-cpu-tools").touch()
    return tmp_path


@needs_make
def test_an_installed_environment_is_not_installed_again(project):
    once, twice = (make("-n", "test", "BACKEND=cpu", cwd=project) for _ in range(2))
    assert once == twice
    (command,) = once.splitlines()
    assert " -m pytest" in command


@needs_make
@pytest.mark.parametrize(("target", "verb"), [("run", "serve --port 0"), ("chat", "chat --port 0")])
def test_the_program_is_started_with_its_model(project, target, verb):
    """`make run` ends with a server, `make chat` in the terminal."""
    said = make("-n", target, "BACKEND=cpu", "ARGS=--port 0", cwd=project)
    programs = [line.partition("/keepwarm ")[2] for line in said.splitlines()]
    assert programs == ["pull smollm2", verb]


@needs_make
@pytest.mark.parametrize(
    ("backend", "newer", "lock"),
    [
        ("cuda", None, "requirements-cuda.lock"),
        ("metal", None, "requirements.lock"),
        ("cpu", "pyproject.toml", "requirements.lock"),
        ("cpu", "requirements.lock", "requirements.lock"),
    ],
)
def test_what_changed_is_installed_from_the_lock(project, backend, newer, lock):
    if newer:
        os.utime(project / newer, (2**32, 2**32))
    said = make("-n", "test", f"BACKEND={backend}", cwd=project)
    packages, ours, tools = (line for line in said.splitlines() if "/pip_progress.py " in line)
    assert packages.endswith(f"--require-hashes --only-binary :all: --requirement {lock}")
    assert ours.endswith("--no-deps --no-build-isolation --editable .")
    assert tools.endswith(
        "--require-hashes --only-binary :all: --requirement requirements-tools.lock"
    )


@needs_make
def test_running_installs_no_tools(project):
    said = make("-n", "run", "BACKEND=cuda", cwd=project)
    assert "requirements-cuda.lock" in said
    assert "requirements-tools.lock" not in said


PIP_SAYS = """
import sys
for n in range(40):
    print(f"Collecting package{n}==1.0")
print("Installing collected packages: a, b")
sys.exit(int(sys.argv[-1]))
"""


@pytest.mark.parametrize("status", [0, 1])
def test_pip_shows_progress_and_its_log_only_if_it_fails(tmp_path, status):
    """A pip that can be told to fail; the real one is run by `.ci/install`."""
    (tmp_path / "pip.py").write_text(PIP_SAYS)
    (tmp_path / "some.lock").write_text("a==1\nb==2\n")
    program = ROOT / "deploy" / "pip_progress.py"
    done = subprocess.run(
        [sys.executable, program, tmp_path / "some.lock", str(status)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    lines = done.stdout.splitlines()
    progress = [line for line in lines if line.startswith(("Packages: ", "Installing 2"))]
    assert progress == [
        "Packages: 1 of 2, package0",
        "Packages: 21 of 21, package20",
        "Installing 2 packages",
    ]
    assert len(lines) == (3 + 41 if status else 3)


SKIPS = """
import pytest

@pytest.mark.skip(reason="needs `git`")
def test_named(): pass

@pytest.mark.skip(reason="not today")
def test_unnamed(): pass

@pytest.mark.soak
def test_long(): raise RuntimeError
"""


def pytest_on(folder: Path, *arguments: str, ci: bool) -> tuple[int, str]:
    """A test run of its own with our conftest, as a plugin."""
    (folder / "test_skips.py").write_text(SKIPS)
    environment = {k: v for k, v in os.environ.items() if k != "CI"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"CI": "true"} if ci else {})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-rN", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("test", "ci", "status"),
    [("named", False, 0), ("named", True, 1), ("unnamed", False, 1)],
)
def test_a_skip_fails_under_ci_and_elsewhere_without_a_program(tmp_path, test, ci, status):
    code, output = pytest_on(tmp_path, f"test_skips.py::test_{test}", ci=ci)
    assert code == status
    assert "1 skipped" in output
    assert ("Tests left out on this machine: 1 (needs `git`)." in output) == (test == "named")
    assert (f"test_skips.py::test_{test}" in output.rpartition("100%")[2]) == bool(status)


def test_long_tests_are_left_out_without_soak(tmp_path):
    code, output = pytest_on(tmp_path, "-k", "long", ci=True)
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "3 deselected" in output
    assert pytest_on(tmp_path, "-k", "long", "--soak", ci=True)[0] == pytest.ExitCode.TESTS_FAILED
