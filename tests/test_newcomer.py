"""A newcomer's first hour: a fresh clone, and every command that the first pages print, in order.

Pages are those of the working tree, the code is that of HEAD. In the suite the clone borrows this
environment, and a tiny model stands for the default one. With `--soak` it installs its own and
downloads the model, on a machine that has nothing but Python, make and git: that takes minutes.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from benchmarks.requests.targets import free_port

from tests.kit.checkpoints import write_checkpoint
from tests.kit.waiting import wait_until
from tests.test_docs import ADDRESS, READ_FIRST, ROOT, blocks

LIMIT_S, SOAK_S = 600, 1800  # for all commands together
BLAS = ("KEEPWARM_BLAS", "KEEPWARM_BLAS_THREADS")  # measured once for the suite
CONTAINERS = "needs the containers"  # the one reason for which a block is left out
SERVES = re.compile(r"\b(make run|keepwarm serve)(?=\s*$)", re.MULTILINE)
SUITE = re.compile(r"^make test .*$", re.MULTILINE)  # it runs already

# A command that serves is begun, up to where it is ready, and ended as by Ctrl-C.
SHELL = """
set -xm
server=
begin() {
  end
  "$@" > "$HOME/serve.log" 2>&1 &
  server=$!
  local late=$((SECONDS + START_S))
  until grep -qs $ADDRESS "$HOME/serve.log" && curl -sf $ADDRESS/health/ready > /dev/null; do
    kill -0 $server
    [ $SECONDS -lt $late ]
    sleep 0.1
  done
}
end() {
  if [ -n "$server" ]; then
    kill -INT -- -$server
    wait $server || true
    server=
  fi
}
trap end EXIT
leave_clone() {
  cd ..
  rm -rf keepwarm
}
"""
# One clone for all pages: it would be the same again, and compiled again.
BORROWED = """
leave_clone() {
  cd ..
}
git() {
  [ -d keepwarm ] && return
  command git "$@"
  mkdir keepwarm/.venv
  ln -s $PROGRAMS keepwarm/.venv/bin
  touch keepwarm/.venv/.ready-cpu
}
"""
BANNER = """
grep '^curl ' "$HOME/serve.log" | sh
end
leave_clone
"""
GIT = """
[safe]
  directory = *
[url "{root}"]
  insteadOf = https://REPOSITORY
"""
CLIENT = '#!/bin/sh\necho "claude $* at $ANTHROPIC_BASE_URL"\n'

pytestmark = [
    pytest.mark.skipif(not shutil.which(name), reason=f"needs `{name}`")
    for name in ("curl", "git", "make")
]
pytestmark.append(pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs `.git`"))


def printed(page: Path) -> str:
    """All shell of a page."""
    shell = [block for block in blocks(page.read_text()) if block.language == "sh"]
    reasons = {block.why_not_run for block in shell if block.why_not_run}
    assert all(reason.startswith(CONTAINERS) for reason in reasons), page
    return "".join(block.code for block in shell if not block.why_not_run)


def script(address: str) -> str:
    readme, *others = (SUITE.sub("", printed(page)) for page in READ_FIRST)
    code = SERVES.sub(r"begin \1", readme + BANNER + "".join(others))
    return code.replace(ADDRESS, address)


def bare(folder: Path, address: str) -> dict[str, str]:
    """The environment of somebody who has just come here, with a coding agent installed."""
    ours = (
        "KEEPWARM_",
        "MAKE",
        "MFLAGS",
        "ARGS",
        "VIRTUAL_ENV",
        "PYTHON",
        "PYTEST",
        "MLX_",
        "GIT_",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    places = [each for each in kept["PATH"].split(":") if not Path(each).is_relative_to(ROOT)]
    client = folder / "bin" / "claude"
    client.parent.mkdir()
    client.write_text(CLIENT)
    client.chmod(0o755)
    (folder / ".gitconfig").write_text(GIT.format(root=ROOT))
    direct = f"{kept.get('no_proxy') or kept.get('NO_PROXY', '')},127.0.0.1"
    return kept | {
        "PATH": ":".join([str(client.parent), *places]),
        "HOME": str(folder),
        "ADDRESS": address,
        "KEEPWARM_HOME": str(folder / "home"),
        "KEEPWARM_PORT": address.rpartition(":")[2],
        **dict.fromkeys(("NO_PROXY", "no_proxy"), direct),
    }


def follow(
    folder: Path, address: str, code: str, environ: dict[str, str], limit_s: int = LIMIT_S
) -> str:
    """What the commands print; the first that fails ends them."""
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", SHELL + code],
        cwd=folder,
        env=environ | {"START_S": str(limit_s // 2)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as shell:
        try:
            said, steps = shell.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            end(shell)
            said, steps = shell.communicate()
    log = folder / "serve.log"
    served = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    assert shell.returncode == 0, f"{said[-2000:]}\n{steps[-4000:]}\n{served}"
    assert '"error"' not in said  # what curl shows and does not fail for
    assert said.count(f"claude  at {address}") == 1
    assert f"claude -p What does this project do? at {address}" in said
    return said


def end(shell: subprocess.Popen[str]) -> None:
    """With its jobs, each of which has a process group of its own."""
    shell.send_signal(signal.SIGSTOP)  # it starts no more
    for process in psutil.Process(shell.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    shell.kill()


@pytest.fixture
def address():
    return f"http://127.0.0.1:{free_port()}"


def test_every_command_of_the_first_pages_works_in_a_fresh_clone(tmp_path, address):
    write_checkpoint(tmp_path / "home" / "models" / "smollm2", shape={"head_dim": 64})
    borrowed = {
        "BACKEND": "cpu",
        "KEEPWARM_MAX_TOKENS": "8",
        "PROGRAMS": str(Path(sys.executable).parent),
        "PYTHONPATH": str(tmp_path / "keepwarm" / "src"),
        **{name: os.environ[name] for name in BLAS if name in os.environ},
    }
    follow(tmp_path, address, BORROWED + script(address), bare(tmp_path, address) | borrowed)


def test_commands_that_take_too_long_are_ended_with_their_jobs(tmp_path, address):
    late = "sleep 60 > /dev/null 2>&1 & echo $! > job; wait"
    with pytest.raises(AssertionError):
        follow(tmp_path, address, late, bare(tmp_path, address), limit_s=1)
    job = int((tmp_path / "job").read_text())

    def has_ended() -> bool:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(job).status() == psutil.STATUS_ZOMBIE  # not reaped yet
        return True

    wait_until(has_ended)


@pytest.mark.soak
def test_the_same_with_an_environment_of_its_own(address):
    """On disk, not in memory: an environment is gigabytes."""
    with tempfile.TemporaryDirectory(prefix="keepwarm-clone-") as temporary:
        folder = Path(temporary)
        said = follow(folder, address, script(address), bare(folder, address), SOAK_S)
    assert said.count('"recomputed"') >= 2
