"""The command line, run as a subprocess, or in this process."""

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import mlx.core as mx

from keepwarm.cli.main import main
from tests.kit.checkpoints import EOS, make_tokenizer, write_checkpoint


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "keepwarm", *map(str, arguments)]


def environment(home: Path, **more: str) -> dict[str, str]:
    """This process's environment with a home of its own, no setting but its BLAS, and UTF-8."""
    ours = {key for key in os.environ if key.startswith("KEEPWARM_") and "BLAS" not in key}
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    fixed = {"KEEPWARM_HOME": str(home), "MLX_DISABLE_COMPILE": "1", "PYTHONUTF8": "1"}
    return kept | fixed | more


def keepwarm(
    *arguments: object, home: Path, stdin: bytes = b"", **more: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end; output is kept as bytes."""
    return subprocess.run(
        command(*arguments),
        input=stdin,
        capture_output=True,
        env=environment(home, **more),
        timeout=300,
        check=False,
    )


def keepwarm_here(
    *arguments: object, home: Path, stdin: bytes = b"", **more: str
) -> subprocess.CompletedProcess[bytes]:
    """The same without a process of its own, whose start takes longer than most commands."""
    return main_here(environment(home, **more), *arguments, stdin=stdin)


def main_here(
    environ: Mapping[str, str], *arguments: object, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end in this process, with these variables alone."""
    words = ["keepwarm", *map(str, arguments)]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with (
        mock.patch.dict(os.environ, environ, clear=True),
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8")),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = _code_of_main()
    return subprocess.CompletedProcess(words, code, _written(out), _written(err))


def _code_of_main() -> int:
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    raise AssertionError("the command line ends by SystemExit")


def _written(text: io.TextIOWrapper) -> bytes:
    text.seek(0)
    return text.buffer.read()


def write_endless(directory: Path) -> Path:
    """A tiny model that never says its stop token, with a context too long to fill in a test."""
    checkpoint = write_checkpoint(directory, n_context=1_000_000)
    file = str(checkpoint / "model.safetensors")
    weights = mx.load(file)
    weights["lm_head.weight"][make_tokenizer().token_to_id(EOS)] = 0
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "mlx"})
    return checkpoint
