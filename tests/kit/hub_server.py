"""A hub on the loopback interface: the part of the Hugging Face protocol that downloads use."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """The repositories served, by id, and the requests received."""

    repos: dict[str, Path]
    url: str = ""
    requests: list[str] = field(default_factory=list)  # "METHOD path"

    def commit(self, repo: str) -> str:
        parts = (digest(path) for path in sorted(self.repos[repo].iterdir()))
        return hashlib.sha1("".join(parts).encode()).hexdigest()

    def downloaded(self) -> set[str]:
        return {line.rpartition("/")[2] for line in self.requests if line.startswith("GET /org")}


@contextmanager
def serving(repos: dict[str, Path]) -> Iterator[Hub]:
    hub = Hub(repos)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def digest(path: Path) -> str:
    """Hashes name, size and first bytes: tests serve sparse files larger than any disk."""
    with path.open("rb") as file:
        beginning = file.read(1 << 20)
    return hashlib.sha1(f"{path.name} {path.stat().st_size}".encode() + beginning).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        rest = parts[4:] if is_api else parts[2:]
        if repo not in self.hub.repos:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif not is_api:
            self._file(repo, rest[2])
        elif rest[:1] == ["tree"]:
            self._json([self._entry(file) for file in self._files(repo)])
        else:
            self._json(self._info(repo))

    def _info(self, repo: str) -> dict[str, Any]:
        files = [
            {"rfilename": file.name, "size": file.stat().st_size, "blobId": digest(file)}
            for file in self._files(repo)
        ]
        return {"id": repo, "sha": self.hub.commit(repo), "siblings": files, "private": False}

    def _entry(self, file: Path) -> dict[str, Any]:
        size = file.stat().st_size
        return {"type": "file", "path": file.name, "size": size, "oid": digest(file)}

    def _files(self, repo: str) -> list[Path]:
        return sorted(self.hub.repos[repo].iterdir())

    def _file(self, repo: str, name: str) -> None:
        file = self.hub.repos[repo] / name
        if not file.is_file():
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{digest(file)}"', "X-Repo-Commit": self.hub.commit(repo)}
        return self._answer(200, file.read_bytes(), headers)

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Log nothing; tests read `requests`."""
