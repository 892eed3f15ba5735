#!/usr/bin/env python3
"""Install the built wheel as people do, in clean environments outside the checkout, and ask it.

pip, uvx and pipx, each to the first answer; every backend resolved, and its build of MLX installed;
a lost one repaired. Needs Python, a network and the tools of `make tools`, from whose environment
it is run. An argument names a folder for what was built.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 12  # printed between the command and the first answer
MAX_SECONDS = 1800  # against hanging
PLATFORMS = {"x86_64-manylinux_2_35": "cpu", "aarch64-manylinux_2_35": "cpu", "macos": "metal"}
QUESTION = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}


class Failed(Exception):
    """A check that failed."""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="keepwarm-install-") as folder:
        try:
            trial = Trial(Path(folder))
            trial.run()
        except (Failed, subprocess.CalledProcessError) as error:
            print(getattr(error, "stdout", None) or "", error, sep="\n")
            return 1
        for target in sys.argv[1:2]:
            shutil.copytree(trial.index, target)
    return 0


class Trial:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = folder / "index"
        self.environ = clean_environ(folder, self.index)

    def run(self) -> None:
        self.build()
        tools = self.environment("tools", "uv", "pipx")
        self.resolve(tools / "uv")
        self.install_builds(tools)
        plain = self.environment("plain", "keepwarm")
        self.sh(plain / "keepwarm", "pull", "smollm2")
        self.answer("pip", plain / "keepwarm")
        self.sh(tools / "uvx", "keepwarm", "--version")  # downloads, with lines of its own
        self.answer("uvx", tools / "uvx", "keepwarm")
        self.sh(tools / "pipx", "install", "--quiet", "keepwarm")
        self.answer("pipx", self.folder / "bin" / "keepwarm")
        for name in ("plain", "uv-cache", "pipx"):
            one_build(self.folder / name)
        self.from_source(plain)
        self.repair(plain)

    def build(self) -> None:
        """Wheel and sdist of each package."""
        for source in (ROOT, ROOT / "backend" / "cpu", ROOT / "backend" / "cuda"):
            command = [sys.executable, "-m", "hatchling", "build", "--directory", self.index]
            self.sh(*command, cwd=source)

    def environment(self, name: str, *packages: str) -> Path:
        """Packages in an environment of their own; the folder of its programs."""
        began = time.monotonic()
        where = self.folder / name
        self.sh(sys.executable, "-m", "venv", where)
        self.sh(where / "bin" / "python", "-m", "pip", "install", "--quiet", *packages)
        print(f"{' '.join(packages)}: installed in {time.monotonic() - began:.0f} s", flush=True)
        return where / "bin"

    def resolve(self, uv: Path) -> None:
        """Each choice brings one build of MLX, on each system; two choices are refused."""
        for platform, default in PLATFORMS.items():
            assert_builds(self.requirements(uv, "keepwarm", platform), default)
            assert_builds(self.requirements(uv, "keepwarm[cpu]", platform), default)
            if platform != "macos":
                assert_builds(self.requirements(uv, "keepwarm[cuda]", platform), "cuda-13")
        try:
            self.requirements(uv, "keepwarm[cpu,cuda]", "x86_64-manylinux_2_35")
        except subprocess.CalledProcessError:
            print("backends: one build of MLX for each choice; cpu with cuda is refused")
        else:
            raise Failed("keepwarm[cpu,cuda] resolves, so two builds would be installed.")

    def install_builds(self, tools: Path) -> None:
        """What each choice brings of MLX on this machine, in a folder of its own; one build each.

        Not what the CUDA build needs besides: gigabytes, and none of them has a file of MLX.
        """
        for choice in ("cpu", "cuda") if sys.platform == "linux" else ("metal",):
            extra = "" if choice == "metal" else f"[{choice}]"
            resolved = self.requirements(tools / "uv", f"keepwarm{extra}").splitlines()
            of_mlx = [line for line in resolved if re.match(r"mlx(-cpu|-cuda.*|-metal)?==", line)]
            folder = self.folder / f"builds-{choice}"
            pip = [tools / "python", "-m", "pip", "install", "--quiet", "--no-deps"]
            self.sh(*pip, "--target", folder, *of_mlx)
            one_build(folder)
            print(f"{choice}: one libmlx in {', '.join(of_mlx)}", flush=True)

    def requirements(self, uv: Path, package: str, platform: str | None = None) -> str:
        """What it brings, on this machine or on a platform."""
        command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
        wanted = self.folder / "wanted.txt"
        wanted.write_text(package)
        where = ["--python-platform", platform] if platform else []
        return self.sh(*command, *where, wanted)

    def answer(self, name: str, *command: Path | str) -> None:
        """`serve` by this command, to the first answer."""
        began = time.monotonic()
        with self.serving(*command) as (address, lines):
            said = ask(address)
            seconds, n_lines = time.monotonic() - began, len(lines)
        print(f"{name}: first answer after {seconds:.1f} s and {n_lines} lines: {said!r}")
        if n_lines > MAX_LINES:
            raise Failed("\n".join((f"More than {MAX_LINES} lines before an answer:", *lines)))

    @contextmanager
    def serving(self, *command: Path | str) -> Iterator[tuple[str, list[str]]]:
        server = subprocess.Popen(
            [*command, "serve", "--port", "0"],
            env=self.environ,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        limit = threading.Timer(MAX_SECONDS, server.kill)
        limit.start()
        lines: list[str] = []
        ready = threading.Event()
        reader = threading.Thread(target=collect, args=(server, lines, ready))
        reader.start()
        try:
            ready.wait()
            yield address_in(lines), lines
        finally:
            limit.cancel()
            server.terminate()
            reader.join()
            server.wait()

    def from_source(self, programs: Path) -> None:
        """The sdist is complete: the wheel that is built of it has the same files."""
        (source,) = self.index.glob("keepwarm-*.tar.gz")
        (wheel,) = self.index.glob("keepwarm-*.whl")
        pip, rebuilt = [programs / "python", "-m", "pip"], self.folder / "rebuilt"
        self.sh(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", rebuilt, source)
        (again,) = rebuilt.glob("*.whl")
        if files_in(again) != files_in(wheel):
            raise Failed(f"{source.name} and {wheel.name} hold different files.")
        self.sh(*pip, "install", "--quiet", "--no-deps", "--force-reinstall", again)
        print(f"sdist: {self.sh(programs / 'keepwarm', '--version').strip()}, files of the wheel")

    def repair(self, programs: Path) -> None:
        """Without its build of MLX the program says one sentence; the command in it helps."""
        if sys.platform != "linux":
            return
        self.sh(programs / "python", "-m", "pip", "uninstall", "--yes", "--quiet", "mlx-cpu")
        done = subprocess.run(
            [programs / "keepwarm", "doctor"],
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 2 or done.stderr.count("\n") != 1 or "; run: " not in done.stderr:
            raise Failed(f"doctor without a backend: {done.returncode}, {done.stderr}")
        self.sh(*shlex.split(done.stderr.partition("; run: ")[2]))
        self.sh(programs / "keepwarm", "doctor")
        one_build(programs.parent)
        print("lost backend: one sentence, and its command repairs it")

    def sh(self, *command: Path | str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command,
            env=self.environ,
            cwd=cwd or self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
            timeout=MAX_SECONDS,
        )
        return done.stdout


def clean_environ(folder: Path, index: Path) -> dict[str, str]:
    """A new user's: nothing of ours, but where packages are found and kept."""
    ours = ("KEEPWARM_", "MAKE", "MFLAGS", "VIRTUAL_ENV", "PYTHON", "XDG_", "MLX_", "PIPX_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    cache = Path(os.environ.get("PIP_CACHE_DIR") or Path.home() / ".cache" / "pip")
    for file in (Path.home() / ".pip" / "pip.conf", Path.home() / ".config" / "pip" / "pip.conf"):
        if file.is_file():
            kept.setdefault("PIP_CONFIG_FILE", str(file))
    return kept | {
        "HOME": str(folder / "user"),
        "MACOSX_DEPLOYMENT_TARGET": "15.0",  # of the platform that is resolved for
        "PIP_CACHE_DIR": str(cache),
        "PIP_FIND_LINKS": f"{kept.get('PIP_FIND_LINKS', '')} {index}".strip(),
        "PIPX_HOME": str(folder / "pipx"),
        "PIPX_BIN_DIR": str(folder / "bin"),
        "UV_CACHE_DIR": str(folder / "uv-cache"),
        "UV_FIND_LINKS": str(index),
        "UV_PYTHON": sys.executable,
        "UV_PYTHON_DOWNLOADS": "never",
    }


def collect(server: subprocess.Popen[str], lines: list[str], ready: threading.Event) -> None:
    """All that it prints, to its end; `ready` when there is something to try, or nothing more."""
    for line in server.stdout or ():
        lines.append(line.rstrip())
        if line.startswith("curl "):
            ready.set()
    ready.set()


def address_in(lines: list[str]) -> str:
    for line in lines:
        if line.startswith("curl "):
            return line.split()[1]
    raise Failed("\n".join(("serve ended without an address:", *lines)))


def ask(address: str) -> str:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(QUESTION).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=MAX_SECONDS) as answer:  # noqa: S310
        text: str = json.load(answer)["choices"][0]["message"]["content"]
    if not text:
        raise Failed("The first answer is empty.")
    return text


def assert_builds(requirements: str, expected: str) -> None:
    names = [line.partition("==")[0] for line in requirements.splitlines()]
    found = [name for name in names if name.startswith(("mlx-cpu", "mlx-cuda", "mlx-metal"))]
    if found != [f"mlx-{expected}"]:
        raise Failed(f"Expected mlx-{expected} alone, found {found}.")


def one_build(folder: Path) -> None:
    """As a file: links of a package cache are the same one."""
    found = {path.stat().st_ino for path in folder.rglob("libmlx.*") if path.is_file()}
    if len(found) != 1:
        raise Failed(f"{folder.name} has {len(found)} files libmlx, not 1.")


def files_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


if __name__ == "__main__":
    sys.exit(main())
