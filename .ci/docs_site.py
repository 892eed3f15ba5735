#!/usr/bin/env python3
"""Build the docs site from `docs/` and check every link and anchor in it.

`.ci/docs_site.py FOLDER [URL]` leaves the pages in FOLDER/site. Links that lead out of `docs/` get
the repository's address (URL), which only CI knows; without it they become plain text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)\s]+)\)")
CODE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)


def build(folder: Path, url: str) -> Path:
    """Copy the pages, point their links outward, and have zensical make the site."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    for page in (folder / "docs").rglob("*.md"):
        source = DOCS / page.relative_to(folder / "docs")
        page.write_text(outward(page.read_text(), source, url))
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=folder, env=os.environ | {"NO_COLOR": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return folder / "site"


def outward(text: str, page: Path, url: str) -> str:
    """The page with its links to files outside of docs/ made absolute, or plain text."""

    def change(link: re.Match[str]) -> str:
        path, hash_, anchor = link[2].partition("#")
        target = (page.parent / path).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        file = target.relative_to(ROOT).as_posix()
        return f"[{link[1]}]({url}/blob/main/{file}{hash_}{anchor})" if url else link[1]

    parts = CODE.split(text)
    text = "".join(part if n % 2 else LINK.sub(change, part) for n, part in enumerate(parts))
    return text.replace("https://REPOSITORY", url) if url else text


class Page(HTMLParser):
    """The anchors of a built page, and what it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        self.links += [found[name] for name in ("href", "src") if name in found]


def broken(site: Path) -> list[str]:
    """Links between the pages, and to pictures, that lead nowhere."""
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            found = pages.get(target / "index.html" if target.is_dir() else target)
            if not target.exists() or (anchor and found and anchor not in found.anchors):
                wrong.append(f"{path.relative_to(site)}: {link}")
    return wrong


if __name__ == "__main__":
    site = build(Path(sys.argv[1]).resolve(), sys.argv[2].rstrip("/") if sys.argv[2:] else "")
    if wrong := broken(site):
        raise SystemExit("Links that lead nowhere:\n" + "\n".join(wrong))
    print(f"The docs site is in {site}.")
