"""Which build of MLX is installed. On Linux every build is a package of its own.

All of them install `mlx/lib/libmlx.so`, so two of them overwrite each other. `keepwarm-backend`, of
which an environment has one version, depends on one of them: docs/install.md#backends.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys

from keepwarm.errors import NoBackend

BUILD = re.compile(r"mlx-(cpu|cuda-\d+)")


def installed() -> tuple[str, ...]:
    """The installed builds of MLX for Linux, as `mlx-cpu` or `mlx-cuda-13`."""
    wanted = importlib.metadata.requires("mlx") or []
    names = {found[0] for each in wanted if (found := BUILD.match(each))}
    return tuple(sorted(name for name in names if _is_installed(name)))


def leave_out_torch() -> None:
    """For a process of our own: transformers imports torch where it is installed, which takes
    seconds, and nothing here uses it. A module that is None counts as not installed.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def check() -> None:
    """Raise NoBackend where builds have overwritten each other; MLX may load all the same."""
    builds = installed() if sys.platform == "linux" else ()
    if len(builds) > 1:
        raise NoBackend(
            f"{' and '.join(builds)} are both installed and overwrite each other; to keep "
            f"{builds[-1]} run: {_pip('uninstall', '-y', *builds)} && {_install(builds[-1])}"
        )


def explain(error: ImportError) -> NoBackend:
    """One sentence for an MLX that does not load."""
    builds = installed() if sys.platform == "linux" else ("mlx",)
    if not builds:
        return NoBackend(f"MLX is installed without a backend; run: {_install('mlx-cpu')}")
    if "cuda" in builds[0]:
        return NoBackend(
            f"{builds[0]} does not load ({error}); install a driver for its CUDA, or take the CPU: "
            f"{_pip('uninstall', '-y', *builds)} && {_install('mlx-cpu')}"
        )
    again = _pip("install", "--force-reinstall", "--no-deps", *builds)
    return NoBackend(f"{builds[0]} does not load ({error}); run: {again}")


def _install(build: str) -> str:
    extra = build.removeprefix("mlx-").replace("-", "")
    return _pip("install", f"mlx[{extra}]=={importlib.metadata.version('mlx')}")


def _pip(*arguments: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", *arguments])


def _is_installed(distribution: str) -> bool:
    return next(iter(importlib.metadata.distributions(name=distribution)), None) is not None
