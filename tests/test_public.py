"""The public face: one sorted list of names, typed, documented, and enough for every page."""

import ast
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import keepwarm
from keepwarm import errors
from tests.kit import generated
from tests.kit.api_page import GROUPS
from tests.kit.npm import npm_install
from tests.test_docs import PAGES, blocks

ROOT = Path(__file__).parent.parent
STUB = Path(keepwarm.__file__).with_suffix(".pyi")
PUBLIC_MODULES = {"keepwarm", "keepwarm.kv"}
PYRIGHT = "pyright@1.1.414"
# A user's file is checked as ours are, by what `make lint` has found out about ours.
MYPY_CACHE = ROOT / ".mypy_cache"
SDK_IS_NOT_OURS = """
[[tool.mypy.overrides]]
module = "openai.*"
follow_imports = "skip"
"""


def documented_code():
    """Every page and example as a user's own file."""
    for page in PAGES:
        code = "\n".join(b.code for b in blocks(page.read_text()) if b.language == "python")
        if code:
            yield re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix(""))), code
    for example in (ROOT / "examples").glob("*.py"):
        yield f"example_{example.stem}", example.read_text()


def test_names_are_sorted_and_resolve():
    assert keepwarm.__all__ == sorted(set(keepwarm.__all__))
    assert all(getattr(keepwarm, name) is not None for name in keepwarm.__all__)
    assert dir(keepwarm) == keepwarm.__all__


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = keepwarm.Motor


def test_the_stub_says_the_same():
    imports = [n for n in ast.parse(STUB.read_text()).body if isinstance(n, ast.ImportFrom)]
    typed = {alias.asname: node.module for node in imports for alias in node.names}
    homes = {name: module for module, names in keepwarm._HOMES.items() for name in names.split()}
    assert typed == homes


def test_every_error_of_the_library_is_public():
    """The others are about HTTP requests alone."""
    classes = {n for n, value in vars(errors).items() if isinstance(value, type)}
    of_http = {"BadField", "Forbidden", "NoThreads", "Overloaded", "SlowBody", "StillLoading"}
    of_http |= {"UnknownRequest", "UnknownResponse"}
    assert {n for n in classes if n in keepwarm.__all__} == classes - of_http


def test_every_name_is_in_the_reference():
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted([*listed, "__version__"]) == keepwarm.__all__


def test_the_reference_is_of_this_code():
    assert generated.API.read_text() == generated.api_page(), "run: python -m tests.kit.generated"


def test_pages_and_examples_import_public_names_only():
    for name, code in documented_code():
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keepwarm"):
                assert node.module in PUBLIC_MODULES, name
                allowed = {*keepwarm.__all__, "kv"}
                assert node.module != "keepwarm" or {a.name for a in node.names} <= allowed, name


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    for name, code in documented_code():
        (folder / f"{name}.py").write_text(code)
    options = (ROOT / "pyproject.toml").read_text() + SDK_IS_NOT_OURS
    (folder / "pyproject.toml").write_text(options)
    return folder


def check(*command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_mypy_strict_finds_nothing_in_documented_code_but_a_wrong_call(files):
    """The wrong call is the control: the types really arrive in a user's file."""
    (files / "wrong.py").write_text("import keepwarm\nkeepwarm.Sampling(max_tokens='many')\n")
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(MYPY_CACHE), "."]
    done = subprocess.run(command, cwd=files, capture_output=True, text=True, check=False)
    (files / "wrong.py").unlink()
    assert re.match(r"wrong\.py:2: error: .*incompatible type", done.stdout), done.stdout
    assert "Found 1 error in 1 file" in done.stdout


@pytest.mark.soak
def test_pyright_passes_on_documented_code(files):
    if shutil.which("npm") is None:
        pytest.skip("needs `npm`")
    with tempfile.TemporaryDirectory() as folder:
        program = npm_install(Path(folder), [PYRIGHT]) / "pyright"
        said = check(program, "--pythonpath", sys.executable, ".", cwd=files)
        assert "0 errors" in said
