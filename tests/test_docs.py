"""The pages are true: their code runs, their commands exist, their links lead somewhere."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main
import yaml
from fastapi import FastAPI

from keepwarm.cli import main
from keepwarm.config import Settings
from keepwarm.kv.kinds import KINDS
from keepwarm.models.choices import all_choices
from keepwarm.server.app import ROUTERS
from tests.kit import generated
from tests.kit.checkpoints import write_checkpoint
from tests.server.processes import served

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "keepwarm"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
DEFAULT = 'keepwarm.load("smollm2")'
ADDRESS = "http://127.0.0.1:8181"  # as pages say it; the suite has a server elsewhere
READ_FIRST = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("quickstart", "serving", "sharing")),
]  # whose shell `tests/test_newcomer.py` runs, in a fresh clone
LANGUAGES = {"python", "sh", "json", "toml", "yaml", "text"}  # the last is not code
FILES = ("LICENSE", "deploy", "docs", "examples")  # what the code of a page finds beside it

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


class Block(NamedTuple):
    language: str
    code: str
    line: int
    why_not_run: str | None


BLOCK = re.compile(
    r"^(?:<!-- not run: ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


def blocks(text: str) -> list[Block]:
    return [Block(m[2], m[3], text[: m.start(3)].count("\n"), m[1]) for m in BLOCK.finditer(text)]


def code_of(page: Path, language: str) -> list[Block]:
    """What of a page is to be run."""
    found = blocks(page.read_text())
    return [block for block in found if block.language == language and block.why_not_run is None]


def holding(language: str, pages: list[Path] = PAGES) -> pytest.MarkDecorator:
    """Every page that has code in this language to run."""
    pages = [page for page in pages if code_of(page, language)]
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def execute(page: Path, checkpoint: Path, address: str = ADDRESS) -> None:
    """Run a page's blocks in order, as one program; a tiny model stands for the default one."""
    namespace: dict[str, object] = {}
    for block in code_of(page, "python"):
        code = block.code.replace(DEFAULT, f"keepwarm.load({str(checkpoint)!r})")
        code = "\n" * block.line + code.replace(ADDRESS, address)
        exec(compile(code, str(page), "exec"), namespace)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), shape={"head_dim": 64})


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """A server as `keepwarm serve` starts it, for every block that speaks with one."""
    home, shared = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("shared")
    with served(checkpoint, home, KEEPWARM_REMOTE=shared.as_uri()) as running:
        yield running.url, home


@pytest.fixture
def _own_home(tmp_path, monkeypatch):
    """What the code of a page writes lands in a directory of its own."""
    for name in FILES:
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEEPWARM_HOME", str(tmp_path))
    monkeypatch.delenv("KEEPWARM_STORE", raising=False)


@holding("python")
@pytest.mark.usefixtures("_own_home")
def test_python_runs(page, checkpoint, server):
    execute(page, checkpoint, server[0])


@holding("sh", [page for page in PAGES if page not in READ_FIRST])
@pytest.mark.usefixtures("_own_home")
def test_shell_runs(page, checkpoint, server, tmp_path):
    """All blocks of a page in one shell, which stops at the first command that fails."""
    address, home = server
    code = "\n".join(block.code for block in code_of(page, "sh")).replace(ADDRESS, address)
    if "curl " in code and not shutil.which("curl"):
        pytest.skip("needs `curl`")
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "KEEPWARM_HOME": str(home),
        "KEEPWARM_PORT": address.rpartition(":")[2],
        "KEEPWARM_MODEL": str(checkpoint),
        "KEEPWARM_MAX_TOKENS": "8",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=tmp_path,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert '"error"' not in done.stdout  # what curl shows and does not fail for


@every_page
def test_page_is_true(page):
    """Its blocks are run or parse, its links, commands, make targets and variables exist."""
    text = page.read_text()
    _check_blocks(text)
    assert broken_links(page) == []
    commands = command_lines(text, "keepwarm")
    assert {line: wrong for line in commands if (wrong := unknown_words(line))} == {}
    for line in command_lines(text, "make"):
        assert {word for word in shlex.split(line)[1:] if "=" not in word} <= make_targets(), line
    for line in command_lines(text, "python"):
        assert all((ROOT / script).is_file() for script in re.findall(r"\S+\.py", line)), line
    assert set(re.findall(r"KEEPWARM_[A-Z_]*[A-Z]", text)) <= variables()


@cache
def make_targets():
    return set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def variables():
    known = {f"KEEPWARM_{field.name.upper()}" for field in fields(Settings)}
    for path in SOURCE.rglob("*.py"):
        known |= set(re.findall(r"KEEPWARM_[A-Z_]*[A-Z]", path.read_text()))
    return known


def _check_blocks(text):
    for block in blocks(text):
        assert block.language in LANGUAGES, f"line {block.line}"
        if block.language == "python":
            ast.parse(block.code)
        if block.language == "json":
            json.loads(block.code)
        if block.language == "toml":
            assert set(tomllib.loads(block.code)) <= {field.name for field in fields(Settings)}
        if block.language == "yaml":
            yaml.safe_load(block.code)


def test_no_fence_is_overlooked():
    """What looks like a block is one: the pattern sees every fence of every page."""
    for page in PAGES:
        text = page.read_text()
        n_fences = len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE))
        assert n_fences == 2 * len(blocks(text)), page


@pytest.mark.usefixtures("_own_home")
def test_the_library_in_ten_lines_is_warm_the_second_time(checkpoint, capsys):
    """What the README says of its program is what it prints."""
    warm = []
    for _ in range(2):
        execute(ROOT / "README.md", checkpoint)
        warm.append(re.search(r"(\d+) of (\d+) tokens reused", capsys.readouterr().out))
    assert warm[0][1] == "0"
    assert int(warm[1][1]) == int(warm[1][2]) - 1
    (program,) = code_of(ROOT / "README.md", "python")
    assert len([line for line in program.code.splitlines() if line]) <= 10


# What is made from the code.


def test_the_help_is_current():
    page = generated.COMMAND_LINE.read_text()
    assert page == generated.command_line(), "run: python -m tests.kit.generated"


def test_models_by_memory_are_current():
    page = generated.MODELS.read_text()
    assert page == generated.models(page), "run: python -m tests.kit.generated"
    assert all(f"`{choice.id}`" in page for choice in all_choices())


@pytest.mark.parametrize("name", generated.TABLES)
def test_a_table_is_what_the_code_says(name):
    """Of settings, metrics and rules."""
    table = f"<!-- {name}, from the code -->\n{generated.TABLES[name]()}<!-- end -->\n"
    pages = [page for page in generated.WITH_TABLES if table in page.read_text()]
    assert len(pages) == 1, "run: python -m tests.kit.generated"


def test_every_page_is_listed():
    listed = set(re.findall(r"\]\(([\w/-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert pages - listed == {"index.md"}


# Commands.


def command_lines(text: str, program: str) -> list[str]:
    """Lines of shell blocks, and inline code, that begin with this program."""
    shell = [block.code for block in blocks(text) if block.language == "sh"]
    lines = [line.split("#")[0] for code in shell for line in code.splitlines()]
    # A pipe's last command counts as well as its first.
    parts = [part.strip() for line in lines for part in re.split(r"[|;&]+", line)]
    inline = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    return [line for line in [*parts, *inline] if re.match(rf"{program}(\s|$)", line)]


@cache
def command_line():
    return typer.main.get_command(main.command_line())


def unknown_words(line: str) -> list[str]:
    """The verb and options of a `keepwarm` command line that do not exist."""
    root = command_line()
    verb, *rest = line.split()[1:] or ["--help"]
    if verb.startswith("-"):
        known = {"--help", *(name for parameter in root.params for name in parameter.opts)}
        return [] if verb in known else [verb]
    if verb not in root.commands:
        return [verb]
    command = root.commands[verb]
    if rest and (inner := getattr(command, "commands", {})) and rest[0] != "--help":
        if rest[0] not in inner:
            return [f"{verb} {rest[0]}"]
        command = inner[rest[0]]
    if "--" in rest:  # what follows is another program's
        rest = rest[: rest.index("--")]
    options = {
        name
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    return [word for word in rest if re.match(r"--\w", word) and word not in options]


# Links.


def headings(text: str) -> set[str]:
    """The anchors that a page's headings get."""
    found = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in found}


def links(text: str) -> list[str]:
    """Of Markdown, and of the HTML in it: also what a picture is made of."""
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    found += re.findall(r"<[^>]+\s(?:src|href)=[\"']([^\"']+)", text)
    for several in re.findall(r"<[^>]+\ssrcset=[\"']([^\"']+)", text):
        found += [one.split()[0] for one in several.split(",")]
    return found


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in links(BLOCK.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in headings(target.read_text())):
            broken.append(link)
    return broken


def test_a_wrong_page_is_seen(tmp_path):
    """Control for the readers above."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A b\n[x](#a-b) [x](#c) [x](page.md#a-b) [x](gone.md) [x](https://a.b/c)\n"
        '<source srcset="page.md 1x, a.png 2x"><img src="b.png">\n'
    )
    assert sorted(broken_links(page)) == ["#c", "a.png", "b.png", "gone.md"]
    wrong = {"fly": ["fly"], "run hi --fast": ["--fast"], "cache burn": ["cache burn"]}
    assert {words: unknown_words(f"keepwarm {words}") for words in wrong} == wrong
    assert unknown_words("keepwarm launch claude --print -- --resume") == []
    text = "`keepwarm a`\n```sh\nhead -c 9 x | keepwarm b # c\n```\n"
    assert command_lines(text, "keepwarm") == ["keepwarm b", "keepwarm a"]


# What single pages promise.


def test_every_cache_class_has_its_row():
    """Class and kind as the code has them."""
    page = (ROOT / "docs" / "results" / "kv.md").read_text()
    rows = re.findall(r"^\| `(\w+)`([^|]*)\| (\w+) \|", page, re.MULTILINE)
    documented = {name: kind for name, note, kind in rows if "keep` > 0" not in note}
    assert documented == {cls.__name__: kind.value for cls, kind in KINDS.items()}


def test_every_folder_has_its_place_in_the_structure():
    page = (ROOT / "docs" / "structure.md").read_text()
    folders = [p.parent for p in SOURCE.rglob("__init__.py") if p.parent != SOURCE]
    names = {f"`{folder.relative_to(SOURCE)}/`" for folder in folders}
    assert {name for name in names if name not in page} == set()


def test_the_structure_names_files_that_exist():
    page = (ROOT / "docs" / "structure.md").read_text()
    rooms = "|".join(p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists())
    named = set(re.findall(rf"(?<!tests/)\b((?:{rooms})(?:/\w+)+)\b(?!/)", page))
    assert len(named) > 20
    files = [SOURCE / name for name in named]
    assert [f for f in files if not (f.is_dir() or f.with_suffix(".py").is_file())] == []


def test_examples_are_named_somewhere():
    text = "".join(page.read_text() for page in PAGES)
    assert all(f"examples/{path.name}" in text for path in (ROOT / "examples").glob("*.py"))


# What the reference must name.


def test_every_route_is_documented():
    """Those of the dashboard are for its page alone."""
    app = FastAPI()
    for router in ROUTERS:
        app.include_router(router)
    text = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("serving", "operations"))
    known = unnamed(text)
    paths = [unnamed(path) for path in app.openapi()["paths"]]
    assert "/v1/chat/completions" in paths
    missing = [path for path in paths if not re.search(rf"[` ]{re.escape(path)}[`?]", known)]
    assert {path.rsplit("/dashboard/", 1)[0] for path in missing} == {"/v1"}


def unnamed(text: str) -> str:
    """Paths without the names of their parameters."""
    return re.sub(r"\{\w+\}", "{}", text)
