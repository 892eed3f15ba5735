"""A missing, broken or doubled build of MLX is one sentence with the command that repairs it."""

import os
import re
import subprocess
import sys

import pytest

from keepwarm import backend
from keepwarm.errors import NoBackend

BUILDS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
MLX = "".join(f'Requires-Dist: {build}==9.9; extra == "x"\n' for build in BUILDS)


def install(site, name, more=""):
    folder = site / f"{name.replace('-', '_')}-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n{more}")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function: Linux with these builds of MLX, and no other packages."""

    def make(*builds):
        install(tmp_path, "mlx", MLX)
        for build in builds:
            install(tmp_path, build)
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        monkeypatch.setattr(sys, "platform", "linux")

    return make


@pytest.mark.parametrize("build", BUILDS)
def test_one_build_is_fine(machine, build):
    machine(build)
    backend.check()
    assert backend.installed() == (build,)


def test_two_builds_are_refused_with_what_repairs_them(machine):
    machine("mlx-cpu", "mlx-cuda-13")
    with pytest.raises(NoBackend, match="both installed and overwrite each other") as caught:
        backend.check()
    uninstall, and_then = str(caught.value).split(" run: ")[1].split(" && ")
    assert uninstall.endswith(" -m pip uninstall -y mlx-cpu mlx-cuda-13")
    assert and_then.endswith(" -m pip install 'mlx[cuda13]==9.9'")


@pytest.mark.parametrize(
    ("builds", "sentence"),
    [
        ((), r"MLX is installed without a backend; run: \S+ -m pip install 'mlx\[cpu\]==9\.9'"),
        (("mlx-cpu",), r"mlx-cpu does not load \(libx\); run: \S+ .* --no-deps mlx-cpu"),
        (("mlx-cuda-13",), r"mlx-cuda-13 does not load \(libx\); install a driver .* && .*cpu.*"),
    ],
)
def test_a_build_that_does_not_load_is_explained(machine, builds, sentence):
    machine(*builds)
    assert re.fullmatch(sentence, str(backend.explain(ImportError("libx"))))


@pytest.mark.linux
def test_the_command_line_says_only_that(tmp_path):
    """In a process: every room that imports MLX asks first."""
    install(tmp_path, "mlx-cuda-12")
    install(tmp_path, "mlx-cpu")
    done = subprocess.run(
        [sys.executable, "-m", "keepwarm", "doctor"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "KEEPWARM_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"mlx-cpu and mlx-cuda-12 are both installed[^\n]*\n", done.stderr)
