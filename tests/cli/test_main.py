"""The frame of the command line: quick to answer, and never a traceback."""

import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import keepwarm as package
from keepwarm.__main__ import main as module_main
from tests.cli import command, environment, keepwarm
from tests.kit.generated import commands

COMMANDS = list(commands())
ROOT = Path(__file__).parents[2]
HEAVY = "mlx", "mlx_lm", "numpy", "transformers", "huggingface_hub"


@pytest.mark.parametrize("module", ["keepwarm", "keepwarm.cli.main"])
def test_nothing_heavy_is_imported_before_it_is_needed(module):
    """So that `--help` answers at once: the heavy packages cost seconds."""
    script = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_verb_is_imported_alone():
    """So that `serve` does not wait for the others: all of them cost a tenth of a second."""
    script = """
import sys
from keepwarm.cli.main import main
sys.argv = ["keepwarm", "serve", "--help"]
try:
    main()
finally:
    print([name for name in sorted(sys.modules) if name.startswith("keepwarm.cli.")])
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    own = ["keepwarm.cli.main", "keepwarm.cli.options", "keepwarm.cli.serve"]
    assert out.stdout.splitlines()[-1] == str(own)


INTERRUPTED = "import os, signal; os.kill(os.getpid(), signal.SIGINT); import no_such_module"


@pytest.mark.parametrize(
    ("verb", "module", "status", "said"),
    [
        ("serve", "typer", -signal.SIGINT, b""),  # before the command line is there
        ("doctor", "rich", -signal.SIGINT, b""),  # before the verb is
        ("serve", "uvicorn", 130, b"Stopped.\n"),  # inside it
    ],
)
def test_ctrl_c_during_an_import_is_no_traceback(tmp_path, verb, module, status, said):
    """A shell shows 130 for both. The module in its place interrupts its own import."""
    (tmp_path / f"{module}.py").write_text(INTERRUPTED)
    done = keepwarm(verb, home=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (status, b"", said)


def test_an_ignored_ctrl_c_stays_ignored(tmp_path):
    """As the shell starts what runs in the background."""
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command("--version")]
    (tmp_path / "typer.py").write_text(INTERRUPTED)
    env = environment(tmp_path, PYTHONPATH=str(tmp_path))
    done = subprocess.run(shell, capture_output=True, env=env, check=False, timeout=300)
    assert b"No module named 'no_such_module'" in done.stderr


def test_the_installed_command_is_the_module_s():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"keepwarm": f"{module_main.__module__}:main"}


@pytest.mark.parametrize("group", [[], ["cache"]])
def test_without_a_command_all_are_listed(main_here, group):
    code, out, err = main_here(*group)
    assert (code, out) == (2, "")
    assert err == main_here(*group, "--help")[1]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_is_readable_at_80_columns(main_here, monkeypatch, path):
    """No line is longer, and no summary in a list of commands is cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = main_here(*path, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert not re.search(r"\w\.\.\.$", out.partition("Commands:")[2], re.MULTILINE)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_clients(main_here, monkeypatch, shell):
    """What a shell asks, and what `--install-completion` has it ask."""
    for words, expected in (("mod", "models"), ("launch opencod", "opencode")):
        monkeypatch.setenv("_KEEPWARM_COMPLETE", f"complete_{shell}")
        line = f"keepwarm {words}"
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        code, out, _ = main_here()
        assert code == 0
        assert expected in out
        assert "doctor" not in out


def test_version(main_here):
    assert main_here("--version") == (0, f"{package.__version__}\n", "")


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        ("list", "`keepwarm models` lists"),
        ("ps", "the dashboard"),
        ("help", "`keepwarm --help`"),
        ("demo", "`make demo`"),
        ("stop", "the dashboard unloads a model"),
        ("show", "`keepwarm cache show` an agent"),
    ],
)
def test_commands_of_other_programs_are_answered_with_ours(main_here, verb, says):
    code, out, err = main_here(verb)
    assert (code, out) == (2, "")
    assert err.startswith("No such command; ")
    assert says in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["run"], "Missing argument"),
        (["run", "hi", "--max-tokens", "few"], "The option --max-tokens takes a whole number, not"),
        (["run", "hi", "--temperature", "hot"], "The option --temperature takes a number, not"),
        (["cache", "shw"], "No such command 'shw'"),
    ],
)
def test_usage_error_is_one_sentence_that_says_where_to_read_more(main_here, arguments, says):
    code, out, err = main_here(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(says)
    assert re.fullmatch(r"[A-Z][^\n]*[;?] [Ss]ee `keepwarm[ a-z]* --help`\.\n", err)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["doctor", "--quick"], "--report FILE"),
        (["doctor", "--json", "--report", "page"], "a report is a page"),
        (["cache", "export", "a", "a.kw", "--model", "m"], "name its --format"),
        (["cache", "export", "a", "a.kw", "--tokens", 9, "--turn", 1], "cannot be combined"),
        (["cache", "import", "a.kw", "--tokens", "ids"], "a bundle has its own"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(main_here, arguments, says):
    code, out, err = main_here(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_the_module_is_the_command(tmp_path):
    """In a process of its own: a setting that cannot be read is a sentence too."""
    (tmp_path / "config.toml").write_text("model = ")
    done = keepwarm("run", "hi", home=tmp_path)
    assert (done.returncode, done.stdout) == (2, b"")
    assert re.fullmatch(rb"[^\n]*config.toml is not valid TOML[^\n]*\n", done.stderr)


@pytest.mark.parametrize("line", ["disk_bytes = -1", "port = 8181.7", 'home = "/elsewhere"'])
def test_a_bad_setting_is_one_sentence_and_exit_2(main_here, tmp_path, line):
    (tmp_path / "config.toml").write_text(line)
    code, out, err = main_here("models")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert line.split()[0] in err


def test_an_unknown_variable_is_one_warning(main_here, monkeypatch):
    """Even where the settings are read more than once."""
    monkeypatch.setenv("KEEPWARM_MODLE", "smollm2")
    code, _, err = main_here("doctor", "--json")
    assert code == 0
    assert err.count("KEEPWARM_MODLE") == 1
    assert "did you mean KEEPWARM_MODEL?" in err


@pytest.mark.parametrize(
    ("arguments", "closed", "status"),
    [
        (("run", "-"), "<&-", 2),
        (("cache", "clear"), "<&-", 2),
        (("cache", "gc"), "2>&-", 0),
        (("models",), ">&-", 0),
    ],
)
def test_a_closed_standard_stream_is_an_empty_one(tmp_path, arguments, closed, status):
    """As of a service that is started without them."""
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command(*arguments)]
    done = subprocess.run(shell, capture_output=True, env=environment(tmp_path), check=False)
    assert done.returncode == status, done.stderr
    assert len(done.stderr.splitlines()) == (status == 2)


@pytest.mark.parametrize("arguments", [("models",), ("models", "--fit"), ("--help",)])
def test_output_that_cannot_be_written_is_one_sentence(tmp_path, arguments):
    shell = ["sh", "-c", 'ulimit -f 0; exec "$@" >out', "sh", *command(*arguments)]
    environ = {**environment(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(shell, capture_output=True, cwd=tmp_path, env=environ, check=False)
    assert done.stderr.splitlines() == [b"The output cannot be written (File too large)."]
    assert done.returncode == 2
