"""python -m tests.clients.foreign llama.cpp=CHECKOUT vllm=CHECKOUT

Runs the server tests of other projects against `keepwarm serve` with tiny models, each in an
environment with the packages that it needs, and writes docs/results/foreign-tests.json and its
page. What is not named keeps its results.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tokenizers.processors import TemplateProcessing

from tests.clients.coders.model import FILE, write_model
from tests.clients.foreign.page import RESULTS, page
from tests.clients.foreign.suites import SUITES, Suite
from tests.kit.agent_model import N_CONTEXT, TOOLS_CHATML
from tests.kit.checkpoints import SPECIALS, make_tokenizer, write_checkpoint
from tests.server.processes import served

HERE = Path(__file__).parent
KEY = "sk-this-is-the-secret-key"  # of llama.cpp's tests
LOCAL = ",".join(
    f"http://{host}{port}" for host in ("localhost", "127.0.0.1", "[::1]") for port in ("", ":*")
)
SMALL, LARGE = 512, 8192  # contexts that the tests count on
LIMIT_S = 120  # of one test
CHANGING = re.compile(r"(?<=127\.0\.0\.1:)[0-9]+|0x[0-9a-f]+|(?<=-)[0-9a-f]{16,}|/tmp/[^ ']*")
MOST_SAID = 240  # characters


def main(arguments: list[str]) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for argument in arguments:
        name, _, checkout = argument.partition("=")
        tests = run(SUITES[name], Path(checkout).resolve())
        results[name] = {"commit": _commit(checkout), "tests": tests}
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        RESULTS.with_suffix(".md").write_text(page(results))


def run(suite: Suite, checkout: Path) -> dict[str, Any]:
    """Which tests passed, and which did not with which parameters."""
    with tempfile.TemporaryDirectory() as place, _servers(Path(place)) as urls:
        python = _environment(Path(place) / "venv", suite.packages)
        report = Path(place) / "report.xml"
        plugins = f"{HERE / 'plugins'}{os.pathsep}."
        asked = ("-p", suite.plugin, f"--timeout={LIMIT_S}", f"--junitxml={report}")
        quiet = ("-q", "--tb=short", "--continue-on-collection-errors", "-p", "no:cacheprovider")
        chosen = (*suite.options, "-m", "not slow", *suite.files)
        environ = {"PYTHONPATH": plugins, "PY_IGNORE_IMPORTMISMATCH": "1"}
        subprocess.run(
            [python, "-m", "pytest", *asked, *quiet, *chosen],
            cwd=checkout / suite.folder,
            env={**os.environ, **urls, **environ},
            check=False,
        )
        return outcomes_of(report)


@contextmanager
def _servers(place: Path) -> Iterator[dict[str, str]]:
    """With random words, one of them with a key; and one whose answers end and which calls."""
    tokenizer = make_tokenizer()
    begin = SPECIALS[1]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    small = write_checkpoint(
        place / "small", template=TOOLS_CHATML, n_context=SMALL, seed=3, tokenizer=tokenizer
    )
    wide = write_checkpoint(place / "wide", template=TOOLS_CHATML, n_context=LARGE, seed=3)
    large = write_model(place / "large", "get_current_weather", {"city": "Paris"})
    _edit(large / "config.json", str(N_CONTEXT), str(LARGE))
    _edit(large / "tokenizer_config.json", FILE, "weather")
    keyed = {"KEEPWARM_API_KEYS": KEY, "KEEPWARM_ALLOWED_ORIGINS": "*"}
    hot = {"KEEPWARM_TEMPERATURE": "1"}  # greedily, random words never end
    local = {"KEEPWARM_ALLOWED_ORIGINS": LOCAL}
    named = Path(f"tinyllama-2={small}")
    with ExitStack() as stack:
        begun = {
            "KEEPWARM_URL": stack.enter_context(served(named, place / "a", **local)),
            "KEEPWARM_KEYED_URL": stack.enter_context(served(named, place / "b", **keyed)),
            "KEEPWARM_RANDOM_URL": stack.enter_context(served(wide, place / "d", **hot)),
            "KEEPWARM_LARGE_URL": stack.enter_context(served(large, place / "c")),
        }
        urls = {name: server.url for name, server in begun.items()}
        yield {**urls, "KEEPWARM_LARGE_MODEL": str(large)}


def _edit(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


def _environment(place: Path, packages: tuple[str, ...]) -> Path:
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    python = place / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def outcomes_of(report: Path) -> dict[str, Any]:
    """By `file::test`: how many passed, and what those that did not said, by their parameters."""
    found: dict[str, Any] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        file = f"{case.get('classname', '').rpartition('.')[2]}.py"
        name, _, parameters = case.get("name", "").partition("[")
        outcome = found.setdefault(f"{file}::{name}", {"passed": 0, "failed": {}})
        failed = [case.find(kind) for kind in ("failure", "error")]
        texts = [each.text or "" for each in failed if each is not None]
        if texts:
            outcome["failed"][parameters.removesuffix("]")] = said_in(texts[0])
        else:
            outcome["passed"] += 1
    return found


def said_in(trace: str) -> str:
    """The line of the test that failed, and the error: without what another run says otherwise."""
    lines = trace.splitlines()
    errors = [at for at, line in enumerate(lines) if line.startswith("E ")]
    first = errors[0] if errors else len(lines)
    source = next((line.strip() for line in reversed(lines[:first]) if line.strip(" ^~")), "")
    error = lines[first].removeprefix("E").strip() if errors else ""
    return CHANGING.sub("…", f"{source} → {error}")[:MOST_SAID]


def _commit(checkout: str) -> str:
    asked = ("git", "-C", checkout, "rev-parse", "--short=12", "HEAD")
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main(sys.argv[1:])
