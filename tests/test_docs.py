"""The pages are true: their code runs, their commands exist, their links lead somewhere."""

import ast
import re
import shlex
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main

from keepwarm.cli.main import app
from keepwarm.config import Settings
from keepwarm.kv.kinds import KINDS
from tests.kit.checkpoints import write_checkpoint

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "keepwarm"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/*.md")])
DEFAULT = 'keepwarm.load("smollm2")'
GROUND = "ground"  # the row of structure.md for modules outside of rooms

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


class Block(NamedTuple):
    language: str
    code: str
    line: int
    why_not_run: str | None


BLOCK = re.compile(r"^(?:<!-- not run: (.+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[Block]:
    return [Block(m[2], m[3], text[: m.start(3)].count("\n"), m[1]) for m in BLOCK.finditer(text)]


def execute(page: Path, namespace: dict[str, object], checkpoint: Path) -> None:
    """Run a page's blocks in order, as one program; a tiny model stands for the default one."""
    for block in blocks(page.read_text()):
        if block.language == "python" and block.why_not_run is None:
            code = block.code.replace(DEFAULT, f"keepwarm.load({str(checkpoint)!r})")
            exec(compile("\n" * block.line + code, str(page), "exec"), namespace)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def _own_home(tmp_path, monkeypatch):
    """What the code of a page writes lands in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEEPWARM_HOME", str(tmp_path))
    monkeypatch.delenv("KEEPWARM_STORE", raising=False)


@every_page
@pytest.mark.usefixtures("_own_home")
def test_python_runs(page, checkpoint):
    execute(page, {}, checkpoint)


@pytest.mark.usefixtures("_own_home")
def test_the_library_in_ten_lines_is_warm_the_second_time(checkpoint, capsys):
    """What the README says of its program is what it prints."""
    warm = []
    for _ in range(2):
        execute(ROOT / "README.md", {}, checkpoint)
        warm.append(re.search(r"(\d+) of (\d+) tokens were warm", capsys.readouterr().out))
    assert warm[0][1] == "0"
    assert int(warm[1][1]) == int(warm[1][2]) - 1
    (program,) = [b for b in blocks((ROOT / "README.md").read_text()) if b.language == "python"]
    assert len([line for line in program.code.splitlines() if line]) <= 10


# Commands.


def command_lines(text: str, program: str) -> list[str]:
    """Lines of shell blocks, and inline code, that begin with this program."""
    shell = [block.code for block in blocks(text) if block.language == "sh"]
    lines = [line.split("#")[0] for code in shell for line in code.splitlines()]
    # A pipe's last command counts as well as its first.
    parts = [part.strip() for line in lines for part in re.split(r"[|;&]+", line)]
    inline = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    return [line for line in [*parts, *inline] if re.match(rf"{program}(\s|$)", line)]


def unknown_words(line: str) -> list[str]:
    """The verb and options of a `keepwarm` command line that do not exist."""
    root = typer.main.get_command(app)
    verb, *rest = line.split()[1:] or ["--help"]
    if verb.startswith("-"):
        return [] if verb in {"--help", "--version"} else [verb]
    if verb not in root.commands:
        return [verb]
    options = {name for parameter in root.commands[verb].params for name in parameter.opts}
    return [word for word in rest if re.match(r"--\w", word) and word not in options]


def test_wrong_commands_are_seen():
    assert unknown_words("keepwarm run - --json") == []
    assert unknown_words("keepwarm fly") == ["fly"]
    assert unknown_words("keepwarm run hi --fast") == ["--fast"]
    text = "`keepwarm a`\n```sh\nhead -c 9 x | keepwarm b # c\n```\n"
    assert command_lines(text, "keepwarm") == ["keepwarm b", "keepwarm a"]


@every_page
def test_commands_exist(page):
    lines = command_lines(page.read_text(), "keepwarm")
    assert {line: wrong for line in lines if (wrong := unknown_words(line))} == {}


@every_page
def test_make_targets_exist(page):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in command_lines(page.read_text(), "make"):
        named = [word for word in shlex.split(line)[1:] if "=" not in word]
        assert set(named) <= set(targets), line


@every_page
def test_scripts_exist(page):
    for line in command_lines(page.read_text(), "python"):
        for script in re.findall(r"\S+\.py", line):
            assert (ROOT / script).is_file(), line


@every_page
def test_variables_exist(page):
    known = {f"KEEPWARM_{field.name.upper()}" for field in fields(Settings)}
    for path in SOURCE.rglob("*.py"):
        known |= set(re.findall(r"KEEPWARM_[A-Z_]*[A-Z]", path.read_text()))
    assert set(re.findall(r"KEEPWARM_[A-Z_]*[A-Z]", page.read_text())) <= known


# Links.


def headings(text: str) -> set[str]:
    """The anchors that a page's headings get."""
    found = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in found}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in headings(target.read_text())):
            broken.append(link)
    return broken


@every_page
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A b\n[x](#a-b) [x](#c) [x](page.md#a-b) [x](gone.md) [x](https://a.b/c)\n")
    assert broken_links(page) == ["#c", "gone.md"]


# What single pages promise.


def test_the_versions_that_were_compared_are_installed():
    """S3-79: after an upgrade compare docs/caches.md again and change its line."""
    line = f"Compared with mlx-lm {version('mlx-lm')}, mlx {version('mlx')}."
    assert line in (ROOT / "docs" / "caches.md").read_text().splitlines()


def test_every_cache_class_has_its_row():
    """S3-73, S0-10: class and kind as the code has them."""
    page = (ROOT / "docs" / "caches.md").read_text()
    rows = re.findall(r"^\| `(\w+)`([^|]*)\| (\w+) \|", page, re.MULTILINE)
    documented = {name: kind for name, note, kind in rows if "keep` > 0" not in note}
    assert documented == {cls.__name__: kind.value for cls, kind in KINDS.items()}


def modules() -> dict[str, set[str]]:
    """The modules of every room; those that stand outside of rooms under `ground`."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        if not path.name.startswith("__"):
            room = path.parent.name if path.parent != SOURCE else GROUND
            found.setdefault(room, set()).add(path.stem)
    return found


def test_every_module_has_its_place_in_the_structure():
    page = (ROOT / "docs" / "structure.md").read_text()
    rows = re.findall(r"^\| `?(\w+)/?`?[^|]*\| (.+) \|$", page, re.MULTILINE)
    documented = {room: set(re.findall(r"`(\w+)`", files)) for room, files in rows}
    for room, names in modules().items():
        assert names <= documented[room], room


def test_the_life_of_a_request_names_files_that_exist():
    page = (ROOT / "docs" / "structure.md").read_text()
    named = set(re.findall(r"\b((?:cli|engine|cache|store|kv|prefix)/\w+)\b(?!\.)", page))
    assert named
    assert [name for name in named if not (SOURCE / f"{name}.py").is_file()] == []


def test_examples_are_named_somewhere():
    text = "".join(page.read_text() for page in PAGES)
    assert all(f"examples/{path.name}" in text for path in (ROOT / "examples").glob("*.py"))


def test_code_parses():
    """Also that which is not run."""
    for page in PAGES:
        for block in blocks(page.read_text()):
            if block.language == "python":
                ast.parse(block.code)
