#!/usr/bin/env python3
"""Give a release the address of its repository, which only the release knows.

`.ci/absolute_links.py URL TAG` writes it into the metadata and the README's links, which the package
index shows without our files beside them, into the quick start and the Homebrew formula.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

LINK = re.compile(r"(?<=\]\()(?!https?://|#)([^)\s]+)")
PICTURES = (".png", ".svg", ".webp")
URLS = """
[project.urls]
Homepage = "{url}"
Documentation = "{url}/blob/{tag}/docs/index.md"
Changelog = "{url}/blob/{tag}/CHANGELOG.md"
Issues = "{url}/issues"

[project.scripts]"""


def main(root: Path, url: str, tag: str) -> None:
    def absolute(found: re.Match[str]) -> str:
        kind = "raw" if found[1].endswith(PICTURES) else "blob"
        return f"{url}/{kind}/{tag}/{found[1]}"

    address = url.removeprefix("https://")
    rewrite(
        root / "README.md",
        lambda text: LINK.sub(absolute, text).replace("REPOSITORY", address),
    )
    urls = URLS.format(url=url, tag=tag)
    rewrite(root / "pyproject.toml", lambda text: text.replace("\n[project.scripts]", urls, 1))
    for path in ("deploy/keepwarm.rb", "docs/quickstart.md"):
        rewrite(root / path, lambda text: text.replace("REPOSITORY", address))


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    text = path.read_text()
    changed = change(text)
    if changed == text:
        raise SystemExit(f"{path.name} has nothing to fill in.")
    path.write_text(changed)


if __name__ == "__main__":
    main(Path(__file__).resolve().parent.parent, sys.argv[1].rstrip("/"), sys.argv[2])
