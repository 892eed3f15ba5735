"""The shape of the source: rooms import one way, functions stay short."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

import keepwarm

SOURCE = Path(keepwarm.__file__).parent
# Overridden methods: pydantic, logging, mlx-lm and uvicorn call them.
CALLED_BY_LIBRARIES = {
    "as_linear",
    *("field_title_should_be_set", "formatException", "handle_exit", "make_mask"),
    *("on_tick", "timeout_keep_alive_handler"),
}
MAX_FUNCTION_LINES = 60

# A room imports rooms of a lower level. Rooms of one level are siblings and never meet, except
# on the ground floor. The package itself and `python -m` stand above everything.
GROUND = 0
LEVELS = {
    **dict.fromkeys(("errors", "concurrency", "config", "files", "state_file"), GROUND),
    **dict.fromkeys(("progress", "units", "backend", "blas", "blas_trial", "mlx_import"), GROUND),
    "prefix": 1,
    "records": 2,
    **dict.fromkeys(("kv", "store", "device"), 3),
    **dict.fromkeys(("models", "remote"), 4),
    **dict.fromkeys(("agents", "text"), 5),
    "cache": 6,
    "telemetry": 7,
    "engine": 8,
    "session": 9,
    "server": 10,
    "cli": 11,
    **dict.fromkeys(("__init__", "__main__"), 12),
}

# Words that meant something here alone, or several things; the glossary in docs/index.md has ours.
PRIVATE_WORDS = {
    *("asked", "begun", "behind", "chore", "chores", "doomed", "given", "hand", "hands", "hollow"),
    *("insight", "mark", "mine", "outgrown", "parting", "partings", "said", "seal", "settle"),
    *("sharer", "shelf", "thinning", "told", "traceless", "unheeded", "unsharing", "upkeep"),
    *("wear",),
}

# `prefix` is pure: it computes, and reads and writes nothing.
IMPURE = {
    *("mlx", "mlx_lm", "numpy", "os", "io", "pathlib", "shutil", "tempfile", "sqlite3", "socket"),
    *("subprocess", "threading", "asyncio", "time", "random", "logging", "urllib", "httpx"),
}
DEVICE = {"mlx", "mlx_lm"}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}

Trees = dict[str, ast.Module]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def read_source() -> Trees:
    """Every module by its dotted name; a package is its `__init__`."""
    trees = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        trees[".".join(parts)] = ast.parse(path.read_text())
    return trees


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything a module imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(name: str, trees: Trees) -> str:
    """The module that a dotted name lies in: itself, its parent, or a package's `__init__`."""
    parent = name.rpartition(".")[0]
    candidates = (name, f"{name}.__init__", parent, f"{parent}.__init__")
    return next((c for c in candidates if c in trees), name)


def dependencies(trees: Trees) -> dict[str, set[str]]:
    """Which modules of ours each module of ours imports; the version is nobody's secret."""
    return {
        module: {
            module_of(name, trees)
            for name in imported(tree)
            if name.split(".")[0] == "keepwarm" and name != "keepwarm.__version__"
        }
        for module, tree in trees.items()
    }


def room(module: str) -> str:
    return module.split(".")[1]


def wrong_ways(trees: Trees) -> list[str]:
    """Imports that go up, or sideways above the ground floor."""
    return [
        f"{module} imports {other}"
        for module, others in dependencies(trees).items()
        for other in sorted(others)
        if room(module) != room(other) and not _allowed(room(module), room(other))
    ]


def _allowed(importer: str, other: str) -> bool:
    return LEVELS[other] < LEVELS[importer] or LEVELS[importer] == LEVELS[other] == GROUND


def imported_at_start(trees: Trees, wanted: str) -> list[str]:
    """Modules outside a room that import it when they are imported themselves."""
    return [
        module
        for module, tree in trees.items()
        if room(module) != wanted
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        if any(room(f"{name}.") == wanted for name in imported(node) if "." in name)
    ]


def folder_of(module: str) -> str:
    """`store.index` of `keepwarm.store.index.index`; empty on the ground floor."""
    return ".".join(module.split(".")[1:-1])


def declared(trees: Trees) -> dict[str, set[str]]:
    """What the docstring of each folder says it imports: the sentence that begins so."""
    says = {folder_of(m): ast.get_docstring(t) or "" for m, t in trees.items() if _is_folder(m)}
    sentences = {
        folder: re.search(r"^Imports ([^.]*(?:\.\w[^.]*)*)\.", text, re.MULTILINE)
        for folder, text in says.items()
    }
    assert all(sentences.values()), [folder for folder, found in sentences.items() if not found]
    return {f: set(re.findall(r"`([\w.]+)`", found[1])) for f, found in sentences.items() if found}


def _is_folder(module: str) -> bool:
    return module.endswith(".__init__") and module.count(".") > 1


def undeclared(trees: Trees) -> list[str]:
    """Imports that a folder's docstring does not name.

    A room stands for its wings too, but within its own room a folder names each wing.
    """
    allowed, found = declared(trees), []
    for module, others in dependencies(trees).items():
        folder = folder_of(module)
        for other in sorted(map(folder_of, others)) if folder else ():
            names = {other} if _same_room(folder, other) else {other, other.split(".")[0]}
            if other not in {folder, ""} and not names & allowed[folder]:
                found.append(f"{module} imports from {other}")
    return found


def _same_room(folder: str, other: str) -> bool:
    return folder.partition(".")[0] == other.partition(".")[0]


def folder_imports(trees: Trees) -> dict[str, set[str]]:
    """Which folders of the same room each folder imports; a folder is a layer, so in no circle."""
    found: dict[str, set[str]] = {}
    for module, others in dependencies(trees).items():
        folder = folder_of(module)
        wings = {other for other in map(folder_of, others) if _same_room(folder, other)}
        found.setdefault(folder, set()).update(wings - {folder})
    return found


def imports_of(trees: Trees, packages: set[str]) -> list[str]:
    return [
        f"{module}: {name}"
        for module, tree in trees.items()
        for name in imported(tree)
        if name.split(".")[0] in packages
    ]


def impurities(trees: Trees) -> list[str]:
    found = imports_of(trees, IMPURE)
    for module, tree in trees.items():
        calls = (n.func for n in ast.walk(tree) if isinstance(n, ast.Call))
        names = (f.id for f in calls if isinstance(f, ast.Name))
        found += [f"{module}: {name}()" for name in names if name in IMPURE_CALLS]
    return found


def long_functions(trees: Trees, limit: int = MAX_FUNCTION_LINES) -> list[str]:
    return [
        f"{module}.{node.name}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= limit
    ]


def unsorted_exports(trees: Trees) -> list[str]:
    wrong = []
    for module, tree in trees.items():
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List() as value):
                    names = list(ast.literal_eval(value))
                    wrong += [module] if names != sorted(set(names)) else []
    return wrong


def shared_class_names(trees: Trees) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def private_names(trees: Trees) -> list[str]:
    """Modules and classes named by a word of `PRIVATE_WORDS`."""
    found = []
    for module, tree in trees.items():
        classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        names = [module.rpartition(".")[2], *classes]
        for name in names:
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
            found += [f"{module}: {name}"] if words & PRIVATE_WORDS else []
    return found


def unused_names(trees: Trees) -> list[str]:
    """Functions, classes and methods that nothing in the source mentions but their definition.

    Those of public classes are for users, decorated ones for whatever decorates them.
    """
    mentioned = Counter(chain.from_iterable(map(_mentions, trees.values())))
    return [
        f"{module}.{node.name}"
        for module, tree in trees.items()
        for node in _definitions(tree)
        if not mentioned[node.name] and not node.name.startswith("__")
    ]


def _mentions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                yield name
            case ast.Constant(value=str(text)):
                yield from re.findall(r"\w+", text)  # `__all__`, annotations in quotes, getattr


def _definitions(tree: ast.Module) -> Iterator[Definition]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node
            yield from () if node.name in keepwarm.__all__ else _functions(node)
    yield from (function for function in _functions(tree) if not function.decorator_list)


def _functions(node: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from () if inner.name in CALLED_BY_LIBRARIES else (inner,)


def globals_of(trees: Trees) -> list[str]:
    return [m for m, t in trees.items() for n in ast.walk(t) if isinstance(n, ast.Global)]


@pytest.fixture(scope="module")
def trees() -> Trees:
    return read_source()


def test_every_room_has_its_place(trees):
    assert {room(module) for module in trees} <= LEVELS.keys()


def test_rooms_import_one_way(trees):
    assert wrong_ways(trees) == []


def test_remote_is_imported_only_where_a_remote_is_set(trees):
    assert imported_at_start(trees, "remote") == []


def test_folders_import_what_their_docstrings_name(trees):
    assert undeclared(trees) == []


def test_docstrings_name_nothing_that_is_not_imported(trees):
    used: dict[str, set[str]] = {folder: set() for folder in declared(trees)}
    for module, others in dependencies(trees).items():
        if folder_of(module):
            names = {n for o in map(folder_of, others) for n in (o, o.split(".")[0])}
            used[folder_of(module)] |= names
    assert {f: names - used[f] for f, names in declared(trees).items() if names - used[f]} == {}


def test_modules_import_in_no_circle(trees):
    TopologicalSorter(dependencies(trees)).prepare()


def test_folders_of_a_room_import_one_way(trees):
    TopologicalSorter(folder_imports(trees)).prepare()


def test_prefix_is_pure(trees):
    assert impurities({m: t for m, t in trees.items() if room(m) == "prefix"}) == []


def test_text_does_no_device_work(trees):
    assert imports_of({m: t for m, t in trees.items() if room(m) == "text"}, DEVICE) == []


def test_no_global_statement(trees):
    assert globals_of(trees) == []


def test_exports_are_sorted(trees):
    assert unsorted_exports(trees) == []


def test_no_two_public_classes_share_a_name(trees):
    assert shared_class_names(trees) == {}


def test_names_have_no_private_words(trees):
    assert private_names(trees) == []


def test_nothing_is_there_for_tests_alone(trees):
    assert unused_names(trees) == []


def test_functions_are_short(trees):
    assert long_functions(trees) == []


# Controls: each reader sees what it is there to see.


def _parsed(**modules: str) -> Trees:
    return {f"keepwarm.{name.replace('__', '.')}": ast.parse(c) for name, c in modules.items()}


@pytest.mark.parametrize(
    ("importer", "code"),
    [
        ("errors", "from keepwarm.prefix.blocks import key"),
        ("kv__codec", "def f():\n    from keepwarm.store import disk"),
        ("store__disk", "import keepwarm.kv.codec"),
        ("cache__io", "from keepwarm.engine import engine"),
        ("text__prompt", "from keepwarm.cache import restore"),
    ],
)
def test_a_wrong_import_is_seen(importer, code):
    others = dict.fromkeys(
        ("prefix__blocks", "store__disk", "kv__codec", "engine__engine", "cache__restore"), ""
    )
    assert len(wrong_ways(_parsed(**{**others, importer: code}))) == 1


def test_an_import_at_the_start_is_seen():
    lazy = "if TYPE_CHECKING:\n    {0}\ndef f():\n    {0}".format("import keepwarm.remote.tier")
    rooms = _parsed(cache__a=lazy, cache__b="from keepwarm.remote import tier", remote__tier="")
    assert imported_at_start(rooms, "remote") == ["keepwarm.cache.b"]


def test_an_import_that_no_docstring_names_is_seen():
    sources = {
        "store.__init__": "'Bytes.\\n\\nImports `prefix`.'",
        "store.index.__init__": "'Rows.\\n\\nImports `prefix`, `store`.'",
        "store.disk.__init__": "'Files.\\n\\nImports `prefix`.'",
        "prefix.__init__": "'Keys.\\n\\nImports the ground floor.'",
        "store.index.rows": "",
        "prefix.blocks": "",
        "store.record": "from keepwarm.prefix import blocks",
    }
    rooms = {f"keepwarm.{name}": ast.parse(code) for name, code in sources.items()}
    assert undeclared(rooms) == []
    rooms["keepwarm.store.disk.files"] = ast.parse("from keepwarm.store.index import rows")
    assert undeclared(rooms) == ["keepwarm.store.disk.files imports from store.index"]


def test_folders_that_import_each_other_are_seen():
    both = _parsed(
        store__tier="",
        store__disk="from keepwarm.store.index import rows",
        store__index__rows="from keepwarm.store.tier import Tier",
    )
    with pytest.raises(CycleError):
        TopologicalSorter(folder_imports(both)).prepare()


def test_a_circle_is_seen():
    circle = _parsed(kv__a="from keepwarm.kv import b", kv__b="from keepwarm.kv.a import name")
    with pytest.raises(CycleError):
        TopologicalSorter(dependencies(circle)).prepare()


def test_the_small_readers_see_what_is_wrong():
    long = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
    assert long_functions(_parsed(a=long)) == ["keepwarm.a.f"]
    assert long_functions(_parsed(a=long.replace("    x = 1\n", "", 1))) == []
    assert unsorted_exports(_parsed(a="__all__ = ['b', 'a']")) == ["keepwarm.a"]
    twice = _parsed(a="class A: pass", b="class A: pass\nclass _B: pass", c="class _B: pass")
    assert shared_class_names(twice) == {"A": ["keepwarm.a", "keepwarm.b"]}
    used = "class A:\n    def m(self): pass\n    def n(self): pass\nA().m()\ndef f(): pass"
    assert unused_names(_parsed(a=used)) == ["keepwarm.a.n", "keepwarm.a.f"]
    assert private_names(_parsed(a="class HandBook: pass")) == ["keepwarm.a: HandBook"]
    assert globals_of(_parsed(a="def f():\n    global x")) == ["keepwarm.a"]
    pure = _parsed(prefix__a="import hashlib", prefix__b="from mlx import core\nopen('x')")
    assert impurities(pure) == ["keepwarm.prefix.b: mlx.core", "keepwarm.prefix.b: open()"]
    assert imports_of(pure, DEVICE) == ["keepwarm.prefix.b: mlx.core"]
