"""`make run` from a fresh clone, as on a machine that has nothing but Python, make and git.

It installs everything and fetches the default model, which takes minutes: only with `--soak`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIMIT_S = 1800

pytestmark = [
    pytest.mark.soak,
    *(
        pytest.mark.skipif(not shutil.which(name), reason=f"needs `{name}`")
        for name in ("curl", "git", "make")
    ),
]


def bare(home: Path) -> dict[str, str]:
    """The environment of somebody who has just come here: nothing of ours, nothing of a make's."""
    ours = ("KEEPWARM_", "MAKE", "MFLAGS", "VIRTUAL_ENV", "PYTHON", "PYTEST", "MLX_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    places = kept["PATH"].split(os.pathsep)
    places = [place for place in places if not Path(place).is_relative_to(ROOT)]
    return kept | {"PATH": os.pathsep.join(places), "KEEPWARM_HOME": str(home)}


@pytest.fixture
def clone() -> Iterator[Path]:
    """On disk, not in memory: an environment is gigabytes."""
    with tempfile.TemporaryDirectory(prefix="keepwarm-clone-") as folder:
        where = Path(folder) / "keepwarm"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(where)], check=True)
        yield where


@contextmanager
def running(clone: Path) -> Iterator[subprocess.Popen[str]]:
    """`make run` on a free port, in a group of its own that is told to stop at the end."""
    process = subprocess.Popen(
        ["make", "run", "ARGS=--port 0"],
        cwd=clone,
        env=bare(clone.parent / "home"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    limit = threading.Timer(LIMIT_S, lambda: os.killpg(process.pid, signal.SIGKILL))
    limit.start()
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.communicate()
        limit.cancel()


def said_by(process: subprocess.Popen[str]) -> list[str]:
    """Its lines, up to the one to be tried."""
    lines: list[str] = []
    for line in process.stdout or ():
        lines.append(line.strip())
        if line.startswith("curl "):
            return lines
    raise AssertionError("\n".join(lines))


def test_a_bare_machine_ends_with_a_server_and_a_line_that_works(clone):
    """It prints the address of its pages, and a curl line that is run here as it stands."""
    with running(clone) as process:
        *before, command = said_by(process)
        (page,) = re.findall(r"http://\S+/dashboard", "\n".join(before))
        with urllib.request.urlopen(page) as opened:
            assert opened.status == 200
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"]
    assert answer["keepwarm"]["prompt_tokens"] > 0
