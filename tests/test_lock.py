"""The lock files pin every requirement of pyproject.toml, with hashes and for all systems."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
LOCKS = {"requirements.lock": "cpu", "requirements-cuda.lock": "cuda"}
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
    where = machine(system, processor, python)
    found = {}
    for pin in (pin for pin in pins(lock) if applies(pin, where)):
        assert found.setdefault(canonicalize_name(pin.name), pin) is pin, f"{pin.name}: two pins"
    wanted = [*PROJECT["project"]["dependencies"], *EXTRAS[LOCKS[lock]], *EXTRAS["dev"]]
    for each in (*wanted, *PROJECT["build-system"]["requires"]):
        requirement = Requirement(each)
        if applies(requirement, where):
            (version,) = found[canonicalize_name(requirement.name)].specifier
            assert requirement.specifier.contains(version.version), f"{each}: run `make lock`"


@pytest.mark.parametrize("lock", LOCKS)
def test_no_lock_names_where_packages_come_from(lock):
    """pip's own settings do."""
    assert not re.search(r"://|--index|--find-links|@", (ROOT / lock).read_text())
