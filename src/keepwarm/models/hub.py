"""Models from a hub with the Hugging Face protocol; HF_ENDPOINT and HF_HOME are honoured."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import (
    HfApi,
    scan_cache_dir,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import filter_repo_objects

from keepwarm.device.space import require_disk
from keepwarm.errors import (
    InsufficientResources,
    KeepwarmError,
    UnknownModel,
    Unreachable,
    UnsupportedModel,
)

WEIGHTS = "model*.safetensors"
# The files a text model needs; no .py, because a model's own code is never run.
FILES = [
    "*.json",
    "*.jinja",
    "*.tiktoken",
    "*.txt",
    WEIGHTS,
    "tokenizer.model",
    "tiktoken.model",
]
ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_id(name: str) -> bool:
    return ID.fullmatch(name) is not None and not name.endswith(".gguf")


def id_of_page(address: str) -> str:
    """The model that a page of the hub is about, whichever of its tabs."""
    page = urlsplit(address)
    name = "/".join(page.path.split("/")[1:3])
    if page.hostname not in ("hf.co", "huggingface.co", urlsplit(ENDPOINT).hostname):
        raise UnknownModel(f"{address} is not a page of the hub; name the model as org/name.")
    return name


def cached(name: str) -> Path | None:
    """The complete snapshot on this machine, if there is one; without network access.

    While a newer one is downloaded, or if that was interrupted, it is the one before.
    """
    download = partial(snapshot_download, name, allow_patterns=FILES, local_files_only=True)
    with suppress(HFValidationError):
        for revision in (None, *_revisions(name)):  # None is the newest
            with suppress(LocalEntryNotFoundError):
                return Path(download(revision=revision))
    return None


def _revisions(name: str) -> list[str]:
    """Those with a model, the newest first, but for those of other branches."""
    refs = _folder(name, "refs")
    others = {each.read_text() for each in refs.rglob("*") if each.is_file()}
    if not (refs / "main").is_file():
        return []
    found = [path for path in _folder(name, "snapshots").glob("*") if _has_model(path)]
    found = [path for path in found if path.name not in others]
    return [path.name for path in sorted(found, key=lambda path: -path.stat().st_mtime)]


def _has_model(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob(WEIGHTS))


def _folder(name: str, kind: str) -> Path:
    return Path(HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), kind)


def revision_of(path: Path) -> str:
    """The commit of a snapshot in the hub's cache; "" for any other path."""
    return path.name if path.parent.name == "snapshots" else ""


def fetch(name: str, announce: Callable[[int], None] = lambda _: None) -> Path:
    """The newest snapshot; downloads the files that are missing, and those of another size than
    the hub's. `announce` is told what `n_bytes_here` will be then.
    """
    with _as_keepwarm_errors(name):
        sizes = _sizes(name)
        n_missing = _n_bytes_missing(name, sizes)
        require_disk(name, n_missing, Path(HF_HUB_CACHE))
        announce(n_bytes_here(name) + n_missing)
        path = Path(snapshot_download(name, allow_patterns=FILES))
        damaged = [each for each in sizes if sizes[each] not in (0, (path / each).stat().st_size)]
        if damaged:
            snapshot_download(name, allow_patterns=damaged, force_download=True)
        return path


def n_bytes_here(name: str) -> int:
    """Of a model's files in the cache, whole or not."""
    n_bytes = 0
    for file in _folder(name, "blobs").glob("*"):
        with suppress(FileNotFoundError):  # it was renamed: it is whole
            n_bytes += file.stat().st_size
    return n_bytes


def all_cached() -> dict[str, Path]:
    """Every model with a complete snapshot in the hub's cache."""
    names = sorted(repo.repo_id for repo in _repos())
    found = {name: cached(name) for name in names}
    return {name: path for name, path in found.items() if path and _has_model(path)}


def all_gguf() -> dict[str, Path]:
    """Every GGUF file in the hub's cache, as `org/name/file.gguf`; the newest of each."""
    return {
        f"{repo.repo_id}/{file.file_name}": file.file_path
        for repo in sorted(_repos(), key=lambda each: str(each.repo_id))
        for revision in sorted(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified))
        for file in sorted(revision.files, key=lambda each: str(each.file_name))
        if file.file_name.endswith(".gguf") and file.file_path.is_file()
    }


def _repos() -> list[Any]:
    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def _sizes(name: str) -> dict[str, int]:
    """The bytes of each file that a text model needs, as the hub has them."""
    files = HfApi().model_info(name, files_metadata=True).siblings or []
    sizes = {file.rfilename: file.size or 0 for file in files}
    if not any(fnmatch(path, WEIGHTS) for path in sizes):
        raise UnsupportedModel(_no_weights(name, sizes))
    return {path: sizes[path] for path in filter_repo_objects(sizes, allow_patterns=FILES)}


def _no_weights(name: str, paths: Iterable[str]) -> str:
    said = f"{name} has no weights as {WEIGHTS}; name its MLX conversion"
    gguf = next((path for path in sorted(paths) if path.endswith(".gguf")), None)
    if gguf is None:
        return f"{said}, or another model."
    known_as = f"{name}/{Path(gguf).name}"
    return (
        f"{said}, or a GGUF file: download one with `hf download {name} {gguf}`, then name it "
        f"{known_as}."
    )


def _n_bytes_missing(name: str, sizes: dict[str, int]) -> int:
    here = {path: try_to_load_from_cache(name, path) for path in sizes}
    return sum(sizes[path] for path in sizes if not isinstance(here[path], str))


@contextmanager
def _as_keepwarm_errors(name: str) -> Iterator[None]:
    """Raise the hub library's errors as Keepwarm's."""
    try:
        yield
    except KeepwarmError:
        raise
    except GatedRepoError as error:
        raise UnknownModel(
            f"Access to {name} is restricted; request access on its hub page, then set HF_TOKEN."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UnknownModel(
            f"The hub has no model {name}, or it is private; check the name, or set HF_TOKEN."
        ) from error
    except Exception as error:  # connection errors depend on the HTTP client it uses
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise InsufficientResources(
                f"The disk became full while {name} was downloaded; free some space."
            ) from error
        raise Unreachable(
            f"{name} could not be downloaded ({_reason(error)}); check the network and HF_ENDPOINT."
        ) from error


def _reason(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {first}"
