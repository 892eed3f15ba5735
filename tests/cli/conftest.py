"""The command line, run inside the test's process."""

import io
import sys

import pytest

from keepwarm.cli.main import main


@pytest.fixture
def main_here(monkeypatch, capsys, tmp_path):
    """A function: run these arguments; the exit code, standard output and standard error."""

    def run(
        *arguments: object, stdin: bytes = b"", home: object = tmp_path
    ) -> tuple[int, str, str]:
        monkeypatch.setenv("KEEPWARM_HOME", str(home))
        monkeypatch.setattr(sys, "argv", ["keepwarm", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as left:
            main()
        return (left.value.code or 0, *capsys.readouterr())

    return run
