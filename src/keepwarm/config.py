"""Settings and their defaults; file, environment and command line override them.

Order, last wins: defaults, `config.toml`, `KEEPWARM_…` variables, arguments.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import platformdirs

from keepwarm.errors import BadInput
from keepwarm.units import parse_bytes

# NOTE: a secret is given by the environment, or as `@` and the path of a file with it. A secret
# that begins with @ must be in a file.
SECRETS = frozenset({"encryption_key", "api_keys", "admin_key", "remote_password", "fleet_key"})
FROM_FILE = "@"
PREFIX = "KEEPWARM_"
CONFIG = "config.toml"
OTHER_VARIABLES = frozenset({"API_KEY", "BLAS", "BLAS_THREADS"})  # with this prefix too
KEY_NAME = re.compile(r"(?!admin$)[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class NamedKey(NamedTuple):
    name: str
    key: str


@dataclass(frozen=True)
class Settings:
    home: Path  # agents, blocks and measurements of this machine
    store: Path  # the block store
    downloads: Path | None = None  # downloaded models; the home directory if empty
    model: str = "smollm2"
    max_tokens: int = 512
    sampling: str = "model"  # defaults of generation_config.json; or `greedy`
    temperature: float | None = None  # of requests that name none; 0 is greedy
    context: int = 0  # tokens of prompt and answer, if fewer than the model's own
    kv_bits: int = 0  # quantise keys and values to 2, 4 or 8 bits; 0 keeps them exact
    kv_group_size: int = 64  # of quantised keys and values
    quantized_kv_start: int = 0  # tokens before this position are not quantised
    at_rest: str = "exact"  # q8, q4: keys and values are stored in fewer bits
    speculation: str = "off"  # auto: several tokens a step where that is faster
    max_kv_size: int = 0  # keep only this many of the last tokens; 0 keeps all
    memory_bytes: int = 0  # blocks in memory; 0 is a share of this machine's memory
    disk_bytes: int = 20 << 30  # total size of the store directory
    disk_writes_per_day: int = 0  # bytes; 0 is no limit
    retention_s: float = 0.0  # new agents are deleted when unused for longer; 0: never

    encryption_key: str = field(default="", repr=False)  # secret; or @file

    remote: str = ""  # tiers that machines share, separated by commas: redis://…, s3://…, file:///…
    remote_password: str = field(default="", repr=False)  # secret; or @file
    remote_writes_per_day: int = 0  # bytes written to shared tiers; 0 is no limit
    remote_bytes: int = 0  # limit of each shared directory or bucket; 0 is none
    remote_age_s: float = 0.0  # delete blocks there that are unused for longer; 0: never
    share_at_once: bool = False  # share every turn when it ends, not at its second use
    share_numerics: str = "own"  # `any`: also use blocks of machines that compute other numbers
    fleet_key: str = field(default="", repr=False)  # signs shared blocks; secret, or @file

    signing_key_file: str = ""  # exports are signed with this Ed25519 key
    trusted_keys: str = ""  # files of public keys, separated by commas: their bundles are trusted

    host: str = "127.0.0.1"  # other than loopback needs an API key
    port: int = 8181
    api_keys: str = field(default="", repr=False)  # secret: keys separated by commas; or @file
    admin_key: str = field(default="", repr=False)  # secret; or @file
    allowed_hosts: str = ""  # accepted Host headers besides this machine's names
    allowed_origins: str = ""  # web origins that may call the server
    mcp: str = "off"  # an endpoint for agents to manage their memory; `all`: deleting too
    kv_events: str = ""  # addresses of KV events and replay, such as tcp://127.0.0.1:5557,…
    kv_events_public: bool = False  # KV events, which are not encrypted, for other machines too
    kv_events_token_ids: bool = False  # include all prompts' tokens, which indexers match
    share_cache: bool = False  # all API keys share cached blocks
    raw_special_tokens: bool = True  # parse special tokens in raw prompts; false: they are text
    more_models: str = ""  # further models, separated by commas: a model, or `name=model`
    on_demand: str = ""  # models on this machine that requests may load: `org/*`, `/models/*`
    pinned_models: str = ""  # names of models that stay loaded
    model_ttl_s: float = 0.0  # a model that is unused for longer is unloaded; 0: never
    weights_bytes: int = 0  # weights of all loaded models; 0 is a share of this machine's memory
    load_wait_s: float = 60.0  # how long a request waits until its model is loaded
    scrub: str = ""  # rules to turn on, or off with `-`: `-billing-header,date`
    stable_first: str = "known"  # blocks of known clients come behind stable text; `all`, `off`
    skip_unreadable: bool = False  # an image in the newest message becomes a note, not an error
    strict_model: bool = False  # refuse requests that name an unknown model
    max_body_bytes: int = 32 << 20
    max_concurrency: int = 128  # concurrent requests of one key
    max_agents: int = 10_000  # agents of one key
    max_queue: int = 256  # waiting and running requests of all keys
    audit_share: float = 0.0  # share of cached answers that is recomputed cold and compared
    request_timeout_s: float = 3600.0
    client_timeout_s: float = 30.0  # for a client to send a header, continue a body, or read
    response_ttl_s: float = 30 * 86400.0  # how long responses stay on disk; 0: memory only
    prepare_timeout_s: float = 30.0  # for a request to be parsed, rendered and tokenised
    rate_per_minute: int = 0  # requests per key; 0 is no limit
    drain_s: float = 20.0  # how long a stopping server waits for running answers
    log_level: str = "info"  # debug, info, warning or error
    log_format: str = "text"  # or json: one object per line

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Settings).items():
            parse_setting(name, kind, getattr(self, name), "Settings")

    def read_secret(self, name: str) -> str:
        """A secret itself, from its file where the setting names one; "" if there is none."""
        value = str(getattr(self, name))
        return read_secret_file(file) if (file := secret_file(value)) else value

    @property
    def remotes(self) -> list[str]:
        """The addresses of shared tiers."""
        return self.listed("remote")

    def read_api_keys(self) -> tuple[str, ...]:
        """Every API key that is accepted; if there are none, no key is needed."""
        return tuple(named.key for named in self.read_named_keys())

    def read_named_keys(self) -> tuple[NamedKey, ...]:
        """The same with the names that a key file gives them; "" for the others."""
        if file := secret_file(self.api_keys):
            named = list(_parse_keys(read_secret_file(file), file))
        else:
            named = [NamedKey("", key) for key in self.api_keys.replace(",", "\n").split()]
            if any(secret_file(each.key) for each in named):
                raise BadInput("api_keys is a list of keys or one @file; put all keys in the file.")
        keys: dict[str, NamedKey] = {}
        for each in named:
            keys.setdefault(each.key, each)
        return tuple(keys.values())

    def listed(self, name: str) -> list[str]:
        """The parts of a setting that are separated by commas."""
        return [part for each in getattr(self, name).split(",") if (part := each.strip())]

    @property
    def models(self) -> Path:
        """Downloaded and converted models."""
        return (self.downloads or self.home) / "models"


ARGUMENTS = "the arguments"


def load(environ: Mapping[str, str] | None = None, **arguments: Any) -> Settings:
    """Settings from all four sources. Arguments that are None count as not given."""
    environ = os.environ if environ is None else environ
    home, downloads, file = find_folders(environ)
    settings = Settings(home=home, store=home / "store", downloads=downloads)
    settings = _override(settings, _from_file(file), "config.toml")
    settings = _override(settings, _from_environment(environ), "the environment")
    given = {key: value for key, value in arguments.items() if value is not None}
    return _override(settings, given, ARGUMENTS)


def is_given(name: str) -> bool:
    """Whether config.toml or the environment has this setting."""
    file = find_folders(os.environ).config
    return name in _from_file(file) or name in _from_environment(os.environ)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each `KEEPWARM_…` variable that means nothing.

    These are no errors: orchestrators set such names for a service that is called keepwarm.
    """
    known = OTHER_VARIABLES | {field.name.upper() for field in fields(Settings)}
    given = sorted(name for name in environ if name.startswith(PREFIX))
    names = [name.removeprefix(PREFIX) for name in given]
    return [_unknown_variable(name, sorted(known)) for name in names if name not in known]


def _unknown_variable(name: str, known: list[str]) -> str:
    hint = _nearest(name, known, PREFIX)
    return f"Warning: the variable {PREFIX}{name} is not a setting and is ignored; {hint}"


def _unknown_setting(name: str, value: Any, source: str, known: list[str]) -> str:
    if isinstance(value, dict):
        return f"{source} has no sections; write what is in [{name}] at its top."
    return f"Unknown setting {name!r} in {source}; {_nearest(name, known)}"


def _nearest(name: str, known: list[str], prefix: str = "") -> str:
    nearest = get_close_matches(name, known, n=1)
    return (
        f"did you mean {prefix}{nearest[0]}?" if nearest else "docs/tuning.md lists all that are."
    )


class Folders(NamedTuple):
    """Where files are kept: in the user's folders, or all in `KEEPWARM_HOME` where that is set."""

    home: Path  # agents, blocks and measurements of this machine
    downloads: Path
    config: Path  # the file, which need not exist


def find_folders(environ: Mapping[str, str]) -> Folders:
    """Raises BadInput for a `KEEPWARM_HOME` that is not a path."""
    if not (given := environ.get("KEEPWARM_HOME")):
        config = platformdirs.user_config_path("keepwarm") / CONFIG
        data, cache = platformdirs.user_data_path, platformdirs.user_cache_path
        return Folders(data("keepwarm"), cache("keepwarm"), config)
    try:
        home = Path(given).expanduser().absolute()
    except (ValueError, RuntimeError) as error:  # RuntimeError: the home of an unknown user
        raise BadInput(f"KEEPWARM_HOME must be a path, not {given!r}.") from error
    return Folders(home, home, home / CONFIG)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text()) if path.is_file() else {}
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); check it.") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number too long
        raise BadInput(f"{path} is not valid TOML ({error}); fix or delete it.") from error
    if "home" in values:
        raise BadInput(
            f"The setting home is not allowed in {path}, which is found by it; set KEEPWARM_HOME."
        )
    for name in SECRETS & values.keys():
        if not secret_file(str(values[name])):
            raise BadInput(
                f"The secret {name} is not allowed in {path}; put it in a separate file and "
                f'write {name} = "@/path/of/the/file".'
            )
    return values


def secret_file(value: str) -> Path | None:
    """The file that a secret's setting names."""
    is_file = value.startswith(FROM_FILE)
    return user_path(value.removeprefix(FROM_FILE)) if is_file else None


def user_path(text: str) -> Path:
    """With the home directory for `~`."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise BadInput(f"The path {text!r} names no home directory; write it in full.") from error


def read_secret_file(path: Path) -> str:
    """The content of a key file; raises if other users can read it."""
    try:
        if path.stat().st_mode & 0o077:
            raise BadInput(f"Other users can read the key in {path}; run: chmod 600 {path}")
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise BadInput(f"The key file {path} cannot be read ({why}); check it.") from error
    if not secret:
        raise BadInput(f"The key file {path} is empty; write a key or a passphrase to it.")
    return secret


def _parse_keys(listed: str, path: Path) -> Iterator[NamedKey]:
    """Lines of bare keys, or `name = key`; a name may have several keys."""
    for number, line in enumerate(listed.splitlines(), start=1):
        words = line.split()
        if "=" not in words:
            yield from (NamedKey("", word) for word in words)
        elif len(words) == 3 and words[1] == "=" and KEY_NAME.fullmatch(words[0]):
            yield NamedKey(words[0], words[2])
        else:
            raise BadInput(
                f"Line {number} of {path} is neither a key nor `name = key`; a name has up to 64 "
                "letters, digits and . _ @ -, and is not admin."
            )


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    names = {field.name for field in fields(Settings)} - {"home"}
    found = {name: environ.get(f"{PREFIX}{name.upper()}") for name in names}
    return {name: value for name, value in found.items() if value}


def _override(settings: Settings, values: Mapping[str, Any], source: str) -> Settings:
    kinds = get_type_hints(Settings)
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in kinds:
            raise BadInput(_unknown_setting(name, value, source, sorted(kinds)))
        changes[name] = parse_setting(name, kinds[name], value, source)
    return replace(settings, **changes)


# What a setting may be, and how text from a file or the environment becomes a value.

FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
BYTES = (0, 1 << 62)  # SQLite and the system count bytes in 63 bits
SECONDS = (0.0, 1e9)  # threads cannot wait much longer
COUNT = (1, 1 << 31)
RANGES: Mapping[str, tuple[float, float]] = {  # of others their unit says it
    "max_tokens": COUNT,
    "context": (0, COUNT[1]),
    "max_kv_size": (0, COUNT[1] - 1),
    "quantized_kv_start": (0, COUNT[1]),
    "temperature": (0.0, 1e30),
    "remote_age_s": (0.0, 1e12),
    "retention_s": (0.0, 1e12),
    "port": (0, 65535),
    "max_body_bytes": (1, BYTES[1]),
    "max_agents": COUNT,
    "max_concurrency": COUNT,
    "max_queue": COUNT,
    "audit_share": (0.0, 1.0),
    "client_timeout_s": (0.1, SECONDS[1]),
    "prepare_timeout_s": (0.1, SECONDS[1]),
    "rate_per_minute": (0, COUNT[1]),
}

CHOICES: Mapping[str, tuple[str, ...] | tuple[int, ...]] = {
    "sampling": ("model", "greedy"),
    "stable_first": ("off", "known", "all"),
    "share_numerics": ("own", "any"),
    "speculation": ("auto", "off"),
    "mcp": ("off", "on", "all"),
    "kv_bits": (0, 2, 4, 8),
    "at_rest": ("exact", "q8", "q4"),
    "kv_group_size": (32, 64, 128),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("text", "json"),
}


def parse_setting(name: str, kind: type, value: Any, source: str) -> Any:
    try:
        return _parse(name, kind, value)
    except ValueError as error:
        shown = "not valid" if name in SECRETS else _shown(value)
        must = f"it must be {_must(name, kind)}"
        option = f"--{name.replace('_', '-')} is {shown}"
        where = option if source == ARGUMENTS else f"The setting {name} is {shown} in {source}"
        raise BadInput(f"{where}; {must}.") from error


def _parse(name: str, kind: type, value: Any) -> Any:
    """ValueError if the value is not of this kind, or out of the setting's range."""
    if is_size(name) and isinstance(value, str):
        value = parse_bytes(value)
    parsed = KINDS[kind].parse(value)
    if parsed not in CHOICES.get(name, (parsed,)):
        raise ValueError(name)
    if (bounds := range_of(name)) and parsed is not None and not bounds[0] <= parsed <= bounds[1]:
        raise ValueError(name)
    return parsed


def range_of(name: str) -> tuple[float, float] | None:
    """The least and the most that a number may be."""
    if name in RANGES or name in CHOICES:
        return RANGES.get(name)
    if is_size(name):
        return BYTES
    return SECONDS if name.endswith("_s") else None


def is_size(name: str) -> bool:
    """Whether a setting is in bytes."""
    return name.endswith(("_bytes", "_writes_per_day"))


def _must(name: str, kind: type) -> str:
    if name in CHOICES:
        return f"one of {', '.join(map(str, CHOICES[name]))}"
    if not (bounds := range_of(name)):
        return KINDS[kind].words
    size = ", or a size such as 20G" if is_size(name) else ""
    return f"{KINDS[kind].words} from {bounds[0]:,} to {bounds[1]:,}{size}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        return "too long"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _parse_flag(value: Any) -> bool:
    if isinstance(value, str):
        value = FLAGS.get(value.lower())
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def _parse_whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(value)
    return int(value)


def _parse_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(value) from error
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _parse_text(value: Any) -> str:
    if not isinstance(value, str | Path) or "\0" in str(value):
        raise ValueError(value)
    return str(value)


def _parse_path(value: Any) -> Path:
    text = _parse_text(value)
    try:
        path = Path(text).expanduser().absolute()
    except RuntimeError as error:  # the home of a user who does not exist
        raise ValueError(value) from error
    if not text:
        raise ValueError(value)
    return path


class SettingKind(NamedTuple):
    parse: Callable[[Any], Any]
    words: str


OPTIONAL: Any = float | None
OPTIONAL_PATH: Any = Path | None
MAX_SHOWN = 80  # characters of a bad value in the error
KINDS: Mapping[type, SettingKind] = {
    bool: SettingKind(_parse_flag, "true or false"),
    int: SettingKind(_parse_whole, "a whole number"),
    float: SettingKind(_parse_number, "a number"),
    OPTIONAL: SettingKind(
        lambda value: None if value is None else _parse_number(value), "a number"
    ),
    str: SettingKind(_parse_text, "a text"),
    Path: SettingKind(_parse_path, "a path"),
    OPTIONAL_PATH: SettingKind(
        lambda value: None if value in (None, "") else _parse_path(value), "a path"
    ),
}
