"""Packages of npm in a folder of their own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

OPTIONS = ("--no-audit", "--no-fund", "--silent")


def npm_install(directory: Path, packages: Sequence[str]) -> Path:
    """Have npm install these, as `name@version`; the folder of their programs.

    npm 11 warns of scripts that run at the installation and are not allowed by name; 12 runs none.
    """
    directory.mkdir(parents=True, exist_ok=True)
    described = directory / "package.json"
    known = json.loads(described.read_text()) if described.is_file() else {}
    allowed = {package.rpartition("@")[0]: True for package in packages}
    known["allowScripts"] = {**known.get("allowScripts", {}), **allowed}
    described.write_text(json.dumps(known))
    subprocess.run(["npm", "install", "--prefix", str(directory), *OPTIONS, *packages], check=True)
    return directory / "node_modules" / ".bin"
