"""Two models share blocks only if nothing that changes the numbers differs."""

import hashlib
import os
import shutil
import subprocess
import sys

import pytest
from mlx_lm.models.cache import make_prompt_cache

from keepwarm.cache.identity import DigestsFile, identify
from keepwarm.errors import BadInput
from keepwarm.kv.layout import Layout, probe
from keepwarm.kv.make import make_caches
from keepwarm.prefix.fingerprint import namespace
from tests.kit.checkpoints import write_checkpoint


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "model")


@pytest.fixture
def layout(tiny_model):
    return probe(tiny_model("llama"), make_prompt_cache(tiny_model("llama")))


def name_of(source, layout, memo, **options):
    return namespace(identify(source, layout, DigestsFile(memo), **options))


def change_middle(path):
    """Flip one byte in the middle of a file and leave its size and times as they were."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def test_one_weight_in_the_middle_counts(source, layout, tmp_path):
    before = name_of(source, layout, tmp_path / "memo")
    assert name_of(source, layout, tmp_path / "memo") == before
    change_middle(source / "model.safetensors")
    assert name_of(source, layout, tmp_path / "memo") != before


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_config_and_tokenizer_count(file, source, layout, tmp_path):
    before = name_of(source, layout, tmp_path / "memo")
    (source / file).write_text((source / file).read_text() + "\n")
    assert name_of(source, layout, tmp_path / "memo") != before


def test_adapter_options_salt_and_layout_count(source, layout, tmp_path, tiny_model):
    memo = tmp_path / "memo"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapters.safetensors").write_bytes(b"low rank")
    quantised = probe(tiny_model("llama"), make_caches(tiny_model("llama"), kv_bits=8))
    names = {
        name_of(source, layout, memo),
        name_of(source, layout, memo, adapter=adapter),
        name_of(source, layout, memo, salt="somebody else"),
        name_of(source, layout, memo, kv_options={"kv_bits": 8}),
        name_of(source, quantised, memo),
    }
    assert len(names) == 5


def test_the_place_does_not_count(source, layout, tmp_path):
    """The same files elsewhere, or on another machine, are the same model."""
    elsewhere = shutil.copytree(source, tmp_path / "elsewhere")
    assert name_of(source, layout, tmp_path / "a") == name_of(elsewhere, layout, tmp_path / "b")


def test_it_is_the_same_in_another_process(source, tmp_path):
    """Never Python's seeded hash."""
    script = (
        "import sys; from pathlib import Path; from keepwarm.cache.identity import *;"
        "from keepwarm.kv.layout import Layout; from keepwarm.prefix.fingerprint import namespace;"
        "print(namespace(identify(Path(sys.argv[1]), Layout(()), DigestsFile(Path('none')))).hex())"
    )
    other = subprocess.run(
        [sys.executable, "-c", script, str(source)],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == name_of(source, Layout(()), tmp_path / "memo").hex()


def test_weights_are_read_once(source, tmp_path):
    """The digest is remembered by path, size, mtime and inode, over processes."""
    digests = DigestsFile(tmp_path / "memo")
    path = source / "model.safetensors"
    first = digests.of(path)
    status = path.stat()
    path.write_bytes(bytes(status.st_size))  # the same inode and size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert DigestsFile(tmp_path / "memo").of(path) == first, "it was read again"
    (tmp_path / "memo" / "machine.json").write_text("not JSON")
    assert DigestsFile(tmp_path / "memo").of(path) != first


def test_digest_of_a_file_that_changes_while_it_is_read_is_not_kept(source, tmp_path, monkeypatch):
    """Half of it would be that of another."""
    path, memo = source / "model.safetensors", tmp_path / "memo"
    read = hashlib.file_digest

    def read_while_it_changes(*given):
        found = read(*given)
        change_middle(path)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(hashlib, "file_digest", read_while_it_changes)
        with pytest.raises(BadInput, match="was changed while it was read"):
            DigestsFile(memo).of(path)
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert DigestsFile(memo).of(path) == expected


def test_digests_are_kept_in_directories_that_are_not_there_yet(source, tmp_path):
    memo, path = tmp_path / "cache" / "keepwarm" / "memo", next(source.glob("*.safetensors"))
    assert DigestsFile(memo).of(path) in (memo / "machine.json").read_text()


def test_a_directory_without_weights_is_refused(tmp_path, layout):
    with pytest.raises(BadInput, match="no weights in"):
        identify(tmp_path, layout, DigestsFile(tmp_path / "memo"))
