"""The lock files pin every requirement of pyproject.toml, with hashes and for all systems."""

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GROUPS = PROJECT["dependency-groups"]
LOCKS = {"requirements.lock": "cpu", "requirements-cuda.lock": "cuda"}
TOOLS = "requirements-tools.lock"
BACKEND = "keepwarm-backend"
LINE = re.compile(r"(\S+==\S+)( ; .+?)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)")
SYSTEMS = [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def machine(system, processor, python):
    return {
        "sys_platform": system,
        "platform_system": system.capitalize(),
        "platform_machine": processor,
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "python_version": python,
        "python_full_version": f"{python}.0",
        "extra": "",
    }


@cache
def pins(lock):
    """Every pin of the file; nothing else is in it but comments."""
    text = re.sub(r"^#.*\n", "", (ROOT / lock).read_text(), flags=re.MULTILINE)
    assert LINE.sub("", text).split() == []
    return [Requirement(f"{pin}{marker}") for pin, marker, _ in LINE.findall(text)]


def applies(requirement, where):
    return requirement.marker is None or requirement.marker.evaluate(where)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("system", "processor"), SYSTEMS)
@pytest.mark.parametrize("lock", LOCKS)
def test_one_pin_satisfies_each_requirement(lock, system, processor, python):
    """`keepwarm-backend` is ours, so that its own requirements are pinned in its place."""
    where = machine(system, processor, python)
    found, tools = one_each(lock, where), one_each(TOOLS, where)
    wanted = [each for each in PROJECT["project"]["dependencies"] if BACKEND not in each]
    wanted += [*backend(LOCKS[lock])["dependencies"], *GROUPS["build"]]
    check(found, [*wanted, *PROJECT["build-system"]["requires"]], where)
    check(tools, GROUPS["dev"], where)
    for name in found.keys() & tools.keys():
        assert found[name].specifier == tools[name].specifier, f"{name}: run `make lock`"


def one_each(lock, where):
    found = {}
    for pin in (pin for pin in pins(lock) if applies(pin, where)):
        assert found.setdefault(canonicalize_name(pin.name), pin) is pin, f"{pin.name}: two pins"
    return found


def check(found, wanted, where):
    for requirement in map(Requirement, wanted):
        if applies(requirement, where):
            (version,) = found[canonicalize_name(requirement.name)].specifier
            message = f"{requirement}: run `make lock`"
            assert requirement.specifier.contains(version.version), message


def backend(folder):
    return tomllib.loads((ROOT / "backend" / folder / "pyproject.toml").read_text())["project"]


def test_a_backend_is_a_version_of_one_package():
    """So that an environment has one of them, and the CPU's, the highest, is the default."""
    cpu, cuda = backend("cpu"), backend("cuda")
    assert cpu["name"] == cuda["name"] == BACKEND
    assert (cpu["version"], cuda["version"]) == ("100.0", "13.0")
    (default,) = (each for each in PROJECT["project"]["dependencies"] if BACKEND in each)
    extras = PROJECT["project"]["optional-dependencies"]
    assert {each["version"] for each in (cpu, cuda) if fits(default, each)} == {"100.0", "13.0"}
    assert fits(*extras["cpu"], cpu)
    assert fits(*extras["cuda"], cuda)
    assert not fits(*extras["cuda"], cpu)
    assert not fits(*extras["cpu"], cuda)


def fits(requirement, project):
    return Requirement(requirement).specifier.contains(project["version"])


@pytest.mark.parametrize("system", ["linux", "darwin"])
@pytest.mark.parametrize(("lock", "build"), [(LOCK, f"mlx-{LOCKS[LOCK]}") for LOCK in LOCKS])
def test_a_lock_has_one_build_of_mlx(lock, build, system):
    where = machine(system, "arm64" if system == "darwin" else "aarch64", "3.13")
    builds = {name for name in one_each(lock, where) if re.match("mlx-(cpu|cuda|metal)", name)}
    assert builds == ({"mlx-metal"} if system == "darwin" else {build.replace("cuda", "cuda-13")})


@pytest.mark.parametrize("lock", [*LOCKS, TOOLS])
def test_no_lock_names_where_packages_come_from(lock):
    """pip's own settings do."""
    assert not re.search(r"://|--index|--find-links|@", (ROOT / lock).read_text())
