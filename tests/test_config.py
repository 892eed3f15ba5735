"""Settings are checked wherever they come from: one sentence, exit code 2."""

import re
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import keepwarm
from keepwarm import config
from keepwarm.config import CHOICES, Settings, range_of
from keepwarm.errors import BadInput

KINDS = get_type_hints(Settings)
NUMBERS = [
    n for n, kind in KINDS.items() if kind in (int, float, float | None) and n not in CHOICES
]


def load_file(home: Path, text: str) -> Settings:
    (home / "config.toml").write_text(text)
    return config.load({"KEEPWARM_HOME": str(home)})


def test_every_number_has_a_range_that_holds_its_default():
    defaults = {field.name: field.default for field in fields(Settings)}
    assert {name for name in KINDS if range_of(name)} == set(NUMBERS)
    for name in NUMBERS:
        low, high = range_of(name)
        assert defaults[name] is None or low <= defaults[name] <= high


def test_a_temperature_that_is_not_given_is_not_zero(tmp_path):
    assert config.load({}).temperature is None
    assert config.load({"KEEPWARM_TEMPERATURE": ""}).temperature is None
    assert config.load({"KEEPWARM_TEMPERATURE": "0"}).temperature == 0
    assert load_file(tmp_path, "temperature = 0").temperature == 0


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_range_is_refused_from_every_source(name, tmp_path):
    low, high = range_of(name)
    for value in (-1, low - 1, high * 2 + 1):
        says = rf"^The setting {name} is .+; it must be a (whole )?number from .+\.$"
        with pytest.raises(BadInput, match=says):
            load_file(tmp_path, f"{name} = {value}")
        with pytest.raises(BadInput, match="in the environment; it must be"):
            config.load({f"KEEPWARM_{name.upper()}": str(value)})
        with pytest.raises(BadInput, match=rf"^--{name.replace('_', '-')} is .+; it must be"):
            config.load({}, **{name: value})
        with pytest.raises(BadInput, match="in Settings; it must be"):
            Settings(tmp_path, tmp_path / "store", **{name: value})


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_one_of_those_listed(name, tmp_path):
    defaults = {field.name: field.default for field in fields(Settings)}
    assert defaults[name] in CHOICES[name]
    for value in CHOICES[name]:
        assert getattr(config.load({f"KEEPWARM_{name.upper()}": str(value)}), name) == value
    other = "other" if KINDS[name] is str else 3
    listed = ", ".join(map(str, CHOICES[name]))
    with pytest.raises(
        BadInput, match=f"^--{name.replace('_', '-')} is .*; it must be one of {listed}"
    ):
        config.load({}, **{name: other})


@pytest.mark.parametrize("name", NUMBERS)
def test_the_ends_of_a_range_are_accepted(name, tmp_path):
    for value in range_of(name):
        assert getattr(load_file(tmp_path, f"{name} = {value}"), name) == value


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("port = 8181.7", "port is 8181.7 .*a whole number from 0 to 65,535"),
        ("port = 8181.0", "port is 8181.0 .*a whole number"),
        ("port = true", "port is True .*a whole number"),
        ("port = 1979-05-27", "a whole number"),
        ("port = []", "a whole number"),
        (f"port = {'9' * 3000}", r"port is 9{80}… in config.toml; it must be"),
        (f"drain_s = {'9' * 3000}", "a number from"),
        (f"port = {'9' * 5000}", "is not valid TOML"),
        ("drain_s = nan", "a number from"),
        ("drain_s = inf", "a number from"),
        ("drain_s = false", "a number from"),
        ("share_cache = 1", "share_cache is 1 .*true or false"),
        ("share_cache = []", "true or false"),
        ("model = 5", "model is 5 .*a text"),
        ("host = true", "a text"),
        ('host = "a\\u0000b"', "a text"),
        ("store = 5", "a path"),
        ('store = ""', "a path"),
        ('store = "~no-such-user-here/x"', "a path"),
        ("[server]\nport = 1", r"has no sections; write what is in \[server\] at its top"),
        ("prot = 1", r"Unknown setting 'prot' in .*; did you mean port\?"),
        (f"x = {'[' * 5000}{']' * 5000}", "is not valid TOML"),
    ],
)
def test_a_wrong_value_in_the_file_is_one_sentence(line, says, tmp_path):
    with pytest.raises(BadInput, match=says) as refused:
        load_file(tmp_path, line)
    assert "\n" not in str(refused.value)


def test_home_in_the_file_would_do_nothing_and_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"home is not allowed in .*; set KEEPWARM_HOME"):
        load_file(tmp_path, 'home = "/elsewhere"')


def test_a_home_that_is_no_path():
    with pytest.raises(BadInput, match="KEEPWARM_HOME must be a path"):
        config.load({"KEEPWARM_HOME": "~no-such-user-here/x"})


def test_a_home_that_cannot_be_looked_into_is_one_sentence(tmp_path):
    """As one below a directory that this user may not read."""
    with pytest.raises(BadInput, match=r"config.toml cannot be read \(File name too long\)"):
        config.load({"KEEPWARM_HOME": str(tmp_path / ("x" * 300))})


@pytest.mark.parametrize("name", ["encryption_key", "admin_key", "fleet_key", "api_keys"])
def test_a_secret_in_the_home_of_nobody_is_one_sentence(name):
    with pytest.raises(BadInput, match="'~no-such-user-here/key' names no home directory"):
        config.load({}, **{name: "@~no-such-user-here/key"}).read_secret(name)


def test_a_secret_is_not_repeated():
    with pytest.raises(BadInput, match="--admin-key is not valid") as refused:
        config.load({}, admin_key="hidden\0key")
    assert "hidden" not in str(refused.value)


def test_an_unknown_variable_is_a_warning_with_the_nearest_name():
    given = {"KEEPWARM_DISK_BYTE": "1", "KEEPWARM_8XQ": "2", "KEEPWARM_PORT": "1", "PATH": "/"}
    far, near = config.unknown_variables(given)
    assert "KEEPWARM_8XQ is not a setting and is ignored; docs/tuning.md" in far
    assert "KEEPWARM_DISK_BYTE is not a setting" in near
    assert near.endswith("did you mean KEEPWARM_DISK_BYTES?")
    assert config.load(given).port == 1


def test_every_variable_that_the_source_names_is_known():
    source = Path(keepwarm.__file__).parent
    named = {
        name
        for file in source.rglob("*.py")
        for name in re.findall(r"KEEPWARM_[A-Z]+(?:_[A-Z]+)*", file.read_text())
    }
    assert "KEEPWARM_BLAS" in named  # control
    assert config.unknown_variables(dict.fromkeys(named, "x")) == []


def test_a_setting_in_bytes_is_a_size(tmp_path):
    assert load_file(tmp_path, 'disk_bytes = "20G"').disk_bytes == 20 << 30
    assert load_file(tmp_path, "disk_bytes = 20").disk_bytes == 20
    environ = {"KEEPWARM_HOME": str(tmp_path), "KEEPWARM_MEMORY_BYTES": "500MB"}
    assert config.load(environ).memory_bytes == 500_000_000


@pytest.mark.parametrize("value", ["20X", "-1", "9999999999T"])
def test_what_is_not_a_size_is_told_how_to_write_one(tmp_path, value):
    with pytest.raises(BadInput, match="or a size such as 20G"):
        load_file(tmp_path, f'disk_bytes = "{value}"')
