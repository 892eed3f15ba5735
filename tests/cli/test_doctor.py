"""`keepwarm doctor`: facts, measurements and advice."""

import json
import re
from urllib.parse import urlsplit

import pytest

import keepwarm
from keepwarm import __version__, blas, config
from keepwarm.cli.doctor import (
    Chip,
    Lengths,
    _at_rest,
    _figures_page,
    _measure_engine,
    _tiers_page,
)
from keepwarm.device.machine import Machine, _advice_on_blas
from keepwarm.engine.padding import KnownVerdict, Verdict, VerdictsFile
from keepwarm.remote.handshake import PLAIN, STORE_META
from keepwarm.remote.opening import RemoteReport, measure_remotes
from tests.cli import keepwarm_here
from tests.kit.checkpoints import write_checkpoint
from tests.kit.redis_server import redis_server

KEYS = [
    *("backend", "device", "blas", "blas_threads", "gemm_gflops"),
    *("memory_total_bytes", "memory_available_bytes"),
    *("home", "store", "free_disk_bytes", "versions", "kernels", "advice"),
    *("config", "models", "not_batched", "remotes"),
]


def doctor(home, *arguments, **environ):
    """The output of the command."""
    done = keepwarm_here("doctor", *arguments, home=home, COLUMNS="200", **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    home, shared = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("shared")
    model = write_checkpoint(home / "tiny", n_context=2048)
    verdict = KnownVerdict("some/model", "0.32.2", Verdict(False, 0.5, 0.0, 97))
    verdicts = VerdictsFile(home)
    verdicts.put("key", verdict, keep=True)
    verdicts.save()
    with redis_server(home) as server:
        remotes = f"{server.url}, {shared.as_uri()}, file://{home}/missing"
        options = {"KEEPWARM_REMOTE": remotes, "KEEPWARM_MODEL": str(model)}
        found = json.loads(doctor(home, "--json", **options))
    assert not [path for path in shared.rglob("*") if path.is_file()], "nothing stays there"
    return home, found


def test_models_that_are_not_batched_are_named(report):
    assert report[1]["not_batched"] == ["some/model"]


def test_shared_tiers_are_measured(report):
    home, found = report
    *usable, missing = found["remotes"]
    for there in usable:
        assert there["problem"] == ""
        assert min(there[name] for name in ("latency_s", "bytes_per_s", "put_bytes_per_s")) > 0
    assert [urlsplit(there["address"]).scheme for there in usable] == ["redis", "file"]
    assert missing["address"] == f"file://{home}/missing"
    assert "No such file" in missing["problem"]


@pytest.mark.parametrize(
    ("mark", "key", "problem"),
    [
        (PLAIN, "", ""),
        (PLAIN, "correct horse battery", "blocks are not encrypted"),
        (b"{}", "", "has encrypted blocks"),
        (b"{}", "correct horse battery", ""),
    ],
)
def test_a_tier_that_would_be_refused_is_not_measured(tmp_path, mark, key, problem):
    (path := tmp_path / STORE_META).parent.mkdir()
    path.write_bytes(mark)
    settings = config.load(
        {"KEEPWARM_HOME": str(tmp_path / "home")}, remote=tmp_path.as_uri(), encryption_key=key
    )
    (found,) = measure_remotes(settings)
    assert problem in found.problem
    assert bool(found.bytes_per_s) == (not problem)
    assert path.read_bytes() == mark


def test_a_report_names_no_host():
    usable = RemoteReport("redis://cache.internal", 0.001, 2e8, put_bytes_per_s=1e8)
    gone = RemoteReport("s3://bucket", problem="no answer from cache.internal")
    page = _tiers_page([usable, gone, usable._replace(latency_s=0.03)])
    assert page == (
        "\n- Shared tier, redis: 1.0 ms, reads 200 MB/s, writes 100 MB/s\n"
        "- Shared tier, s3: not usable\n"
        "- Shared tier, redis: 30.0 ms, reads 200 MB/s, writes 100 MB/s; "
        "too far for prompts that compute in 1.2 s or less\n"
    )
    assert _tiers_page([]) == ""


def test_json_has_every_key_and_sane_values(report):
    home, found = report
    assert list(found) == KEYS
    assert found["backend"] in {"metal", "cuda", "cpu"}
    assert found["device"]
    assert found["gemm_gflops"] > 0
    assert 0 < found["memory_available_bytes"] <= found["memory_total_bytes"]
    assert found["free_disk_bytes"] > 0
    assert (found["home"], found["store"]) == (str(home), str(home / "store"))
    assert "\n" not in found["advice"]
    assert found["advice"].endswith(".")


def test_json_names_the_versions(report):
    _, found = report
    assert set(found["versions"]) == {"keepwarm", "mlx", "mlx-lm", "transformers", "python"}
    assert found["versions"]["keepwarm"] == __version__


def test_json_names_the_blas_that_was_loaded(report):
    """On Linux CPU a fast one, elsewhere MLX brings its own."""
    _, found = report
    assert (found["blas"] is not None) == blas.wanted()
    assert (found["blas_threads"] or 1) in range(1, len(blas.cpus()) + 1)


def test_a_store_that_is_not_there_yet_is_told_and_not_made(tmp_path):
    elsewhere = tmp_path / "not" / "yet" / "there"
    found = json.loads(doctor(tmp_path, "--json", KEEPWARM_STORE=str(elsewhere)))
    assert (found["store"], found["free_disk_bytes"] > 0) == (str(elsewhere), True)
    assert not elsewhere.exists()


@pytest.mark.parametrize(
    ("used", "variable", "value", "lacks", "says"),
    [
        (1, "KEEPWARM_BLAS_THREADS", "1", True, "KEEPWARM_BLAS_THREADS limits BLAS to 1 of 2"),
        (1, "KEEPWARM_BLAS_THREADS", "", True, "apt install libgomp1"),
        (1, "KEEPWARM_BLAS_THREADS", "", False, "to measure again"),
        (2, "KEEPWARM_BLAS_THREADS", "2", True, ""),
        (None, "KEEPWARM_BLAS", "none", False, "KEEPWARM_BLAS=none"),
        (None, "KEEPWARM_BLAS", "", False, "No fast BLAS was found"),
    ],
)
def test_unused_cores_are_explained(monkeypatch, tmp_path, used, variable, value, lacks, says):
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(blas, "wanted", lambda: True)
    monkeypatch.setattr(blas, "lacks_threads", lambda: lacks)
    library = used and blas.Blas("nvpl", "libnvpl.so", "seq", used)
    machine = Machine("cpu", "any", library, 2, 1.0, 1, 1, tmp_path, tmp_path, 1, {})
    advice = _advice_on_blas(machine)
    assert says in advice
    assert bool(advice) == bool(says)


def test_the_table_reads_the_same_facts(main_here, tmp_path):
    _, text, _ = main_here("doctor")
    for word in ("Backend", "GFLOP/s", "Memory", __version__, "Advice"):
        assert word in text


def test_a_path_is_no_markup(main_here, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("KEEPWARM_REMOTE", f"file://{tmp_path}/c[/d]")
    home = tmp_path / "a[" / "b]c"
    home.mkdir(parents=True)
    verdicts = VerdictsFile(home)
    odd = KnownVerdict("[/x]/model", "0.32.2", Verdict(False, 0.5, 0.0, 97))
    verdicts.put("key", odd, keep=True)
    verdicts.save()
    code, text, err = main_here("doctor", home=home)
    assert code == 0, err
    for shown in (str(home), f"{tmp_path}/c[/d]", "[/x]/model"):
        assert shown in text


def test_doctor_report_writes_a_page_to_paste(tmp_path):
    """Cold and restored prompts on this machine, without a path of it."""
    page = tmp_path / "report.md"
    checkpoint = write_checkpoint(tmp_path / "tiny", n_context=2048)
    shown = doctor(tmp_path, "--report", str(page), "--quick", KEEPWARM_MODEL=str(checkpoint))
    text = page.read_text()
    assert text.strip() in shown
    assert f"keepwarm {__version__}" in text
    for name in ("cold", "from memory", "from disk"):
        assert re.search(rf"^\| {name} \| [\d.]+ \| [\d.]+ \|$", text, re.MULTILINE)
    assert re.search(r"^- 4 at once: [\d.]+ tokens/s$", text, re.MULTILINE)
    assert str(tmp_path) not in text


def test_doctor_report_prints_predictions_of_a_known_chip_beside_its_figures(tmp_path):
    """Of a made-up chip, so slow that every part of a prediction is seen in its digits."""
    checkpoint = write_checkpoint(tmp_path / "tiny", n_context=2048)
    named = {"KEEPWARM_HOME": str(tmp_path), "KEEPWARM_MODEL": str(checkpoint)}
    settings = config.load(named)
    chip = Chip(memory_bytes_per_s=1e6, disk_bytes_per_s=1e5)
    figures = _measure_engine(settings, Lengths((256,), 1), chip)
    shape = json.loads((checkpoint / "config.json").read_text())
    heads, layers = shape["num_key_value_heads"], shape["num_hidden_layers"]
    n_kv = 256 * 2 * 4 * layers * heads * shape["head_dim"]
    n_weights = keepwarm.load(str(checkpoint), settings).n_bytes
    step_s = 0.002 + (n_weights + n_kv) / 8e5
    from_disk = figures.first_token_s["from disk, predicted"][256]
    assert from_disk == pytest.approx(step_s + n_kv / 8e4)
    from_memory = figures.first_token_s["from memory, predicted"][256]
    assert from_memory == pytest.approx(step_s + 3 * n_kv / 1e6)
    page = _figures_page(figures)
    assert f"| from disk, predicted | {from_disk:.3f} |" in page
    assert f"- 1 at once, predicted: {1 / (0.002 + n_weights / 8e5):.1f} tokens/s" in page


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("no/page", "does not exist; create it first"),
        (".", "is a directory"),
        ("x" * 300, "cannot be read: File name too long"),
    ],
)
def test_doctor_report_that_cannot_be_written_is_refused(main_here, tmp_path, page, says):
    """Before anything is measured."""
    code, out, err = main_here("doctor", "--report", tmp_path / page)
    assert (code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize(
    ("setting", "value", "free_bytes", "said"),
    [
        ("at_rest", "exact", 100, "exact"),
        ("at_rest", "q4", 100, "q4: fewer bytes, and answers that may differ"),
        ("at_rest", "exact", 99, "exact; the disk has less room than its budget: at_rest=q8"),
        ("disk_writes_per_day", 1, 100, "exact; what may be written is limited: at_rest=q8"),
        ("remote", "redis://cache", 100, "exact; blocks travel to other machines: at_rest=q8"),
    ],
)
def test_fewer_bits_are_advised_where_bytes_are_short(setting, value, free_bytes, said, tmp_path):
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)}, disk_bytes=100, **{setting: value})
    assert _at_rest(settings, free_bytes).startswith(said)
