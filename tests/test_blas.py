"""The fast BLAS: thread counts measured and remembered, loaded before MLX binds its own."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from keepwarm import blas, blas_trial
from keepwarm.blas_trial import SLEEP_WHEN_IDLE, Setting, Speed
from keepwarm.errors import BadInput
from keepwarm.state_file import MACHINE

linux_cpu = pytest.mark.linux_cpu

REPORT = """
import json, os
from dataclasses import asdict
from pathlib import Path
from keepwarm import blas
blas.start()
import mlx.core
from keepwarm.device.machine import gemm_gflops
used = blas.in_use()
maps = Path("/proc/self/maps")
print(json.dumps({
    "blas": used and asdict(used),
    "gflops": gemm_gflops(),
    "maps": maps.read_text() if maps.exists() else "",
    "environ": dict(os.environ),
}))
"""


def child(home, code=REPORT, **environ):
    """What a fresh process reports under these variables."""
    ours = {variable for values in SLEEP_WHEN_IDLE.values() for variable in values}
    mine = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("KEEPWARM_")}
    mine |= {"KEEPWARM_HOME": str(home), **environ}
    run = subprocess.run(
        [sys.executable, "-c", code], env=mine, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture
def found():
    """Every thread count of the library that this machine uses."""
    return blas.settings({})


def first(found):
    """The variables that ask for the first setting, so that nothing is measured."""
    return {"KEEPWARM_BLAS": found[0].name, "KEEPWARM_BLAS_THREADS": str(found[0].threads)}


def kept(home):
    return json.loads((home / "machine.json").read_text())["blas"]


def keep(home, choice):
    (home / "machine.json").write_text(json.dumps({"blas": choice}))


def test_thread_counts_double_up_to_all():
    assert blas.thread_counts(1) == [1]
    assert blas.thread_counts(2) == [1, 2]
    assert blas.thread_counts(6) == [1, 2, 4, 6]
    assert blas.thread_counts(64) == [1, 2, 4, 8, 16, 32, 64]


def test_score_prefers_a_setting_that_does_not_collapse_beside_a_busy_process():
    steady = Speed(prefill=35, decode=7, prefill_contended=35, decode_contended=7)
    collapsing = Speed(prefill=70, decode=14, prefill_contended=3.5, decode_contended=0.7)
    assert steady.score > collapsing.score


def test_none_leaves_no_setting():
    assert blas.settings({"KEEPWARM_BLAS": "none"}) == []


@pytest.mark.parametrize("name", ["atlas", "gnu", "1"])
def test_an_unknown_library_is_refused(name):
    with pytest.raises(BadInput, match="KEEPWARM_BLAS is"):
        blas.settings({"KEEPWARM_BLAS": name})


@pytest.mark.parametrize("threads", ["0", "-1", "two", "1.5"])
def test_a_thread_count_that_is_none_is_refused(threads):
    with pytest.raises(BadInput, match="KEEPWARM_BLAS_THREADS"):
        blas.settings({"KEEPWARM_BLAS_THREADS": threads})


def test_a_library_that_is_not_here_is_refused(found):
    missing = next(name for name in blas.LIBRARIES if name not in {s.name for s in found})
    with pytest.raises(BadInput, match=f"asks for {missing}, which is not installed"):
        blas.settings({"KEEPWARM_BLAS": missing})


@linux_cpu
def test_settings_cover_one_thread_and_all_and_never_the_gnu_layer_of_mkl(found):
    wanted = {1} if blas.lacks_threads() else {1, len(blas.cpus())}
    assert wanted <= {setting.threads for setting in found}
    assert {s.layer for s in found if s.name == "mkl"} <= {"intel", "sequential"}
    assert all(Path(path).exists() for setting in found for path in setting.libraries)


@linux_cpu
def test_without_the_systems_openmp_nvpl_has_one_thread(monkeypatch):
    """With several it would end the process."""
    names = {"core": "core", "lp64_seq": "seq", "lp64_gomp": "gomp"}
    shipped = {f"libnvpl_blas_{pattern}.so.*": [name] for pattern, name in names.items()}
    monkeypatch.setattr(blas, "_shipped", lambda _, pattern: shipped.get(pattern, []))
    monkeypatch.setattr(blas, "_of_the_system", lambda *names: [])
    assert blas.lacks_threads()
    assert [s.threads for s in blas._nvpl([1, 2])] == [1]
    monkeypatch.setattr(blas, "_of_the_system", lambda *names: ["/lib/libgomp.so.1"])
    assert not blas.lacks_threads()
    both = {s.threads: s.libraries for s in blas._nvpl([1, 2])}
    assert both == {1: ("core", "seq"), 2: ("/lib/libgomp.so.1", "core", "gomp")}


@pytest.mark.parametrize("environ", [{}, {"KEEPWARM_BLAS": "openblas"}])
def test_library_comes_by_a_fixed_order_and_nothing_else_is_tried(monkeypatch, environ):
    for name in blas.LIBRARIES[1:]:
        offer = [Setting(name, "layer", n, (name,)) for n in (1, 2)]
        monkeypatch.setattr(blas, f"_{name}", lambda threads, offer=offer: iter(offer))
    monkeypatch.setattr(blas, "_mkl", lambda threads: iter(()))
    expected = environ.get("KEEPWARM_BLAS", "nvpl")
    assert [(s.name, s.threads) for s in blas.settings(environ)] == [(expected, 1), (expected, 2)]


@linux_cpu
def test_the_fastest_thread_count_is_chosen_and_kept(tmp_path, found):
    choice = blas.choose(tmp_path, found)
    scores = {int(n): score for n, score in kept(tmp_path)["scores"].items()}
    assert choice.threads == max(scores, key=scores.__getitem__) == kept(tmp_path)["threads"]
    assert sorted(scores) == [setting.threads for setting in found]


@pytest.fixture
def measured(monkeypatch):
    """The thread counts that were measured; each is as fast as its number."""
    counts = []

    def trial(setting):
        counts.append(setting.threads)
        return Speed(*[float(setting.threads)] * 4, rows_apart=1 + setting.threads)

    monkeypatch.setattr(blas, "trial", trial)
    return counts


@linux_cpu
def test_a_kept_choice_is_used_without_measuring(tmp_path, found, measured):
    two = [replace(found[0], threads=n) for n in (1, 2)]
    assert blas.choose(tmp_path, two) == blas.choose(tmp_path, two) == two[1]
    assert measured == [1, 2]


@linux_cpu
def test_how_many_rows_are_faster_one_by_one_is_kept_with_the_choice(
    tmp_path, found, measured, monkeypatch
):
    two = [replace(found[0], threads=n) for n in (1, 2)]
    blas.choose(tmp_path, two)
    used = blas.Blas(found[0].name, "", "", threads=2)
    monkeypatch.setattr(blas, "in_use", lambda: used)
    assert blas.rows_apart(tmp_path) == 3
    with monkeypatch.context() as patch:
        patch.setattr(blas, "_processor", lambda: "another")
        assert blas.rows_apart(tmp_path) == 1, "another machine's home"
    file, text = tmp_path / MACHINE, (tmp_path / MACHINE).read_text()
    file.write_text(text.replace('"rows_apart":3', '"rows_apart":"x"'))
    assert blas.rows_apart(tmp_path) == 1, "damaged"
    file.write_text(text)
    monkeypatch.setattr(blas, "in_use", lambda: replace(used, threads=1))
    assert blas.rows_apart(tmp_path) == 1, "another count was not measured"
    monkeypatch.setattr(blas, "in_use", lambda: None)
    assert blas.rows_apart(tmp_path) == 1


@pytest.mark.parametrize("n_rows", [1, 2, 3, blas_trial.MAX_APART])
def test_rows_are_multiplied_one_by_one_up_to_where_one_matrix_is_faster(monkeypatch, n_rows):
    """As NVPL: from two rows on a copy of the matrix, which costs as much as so many rows."""
    monkeypatch.setattr(blas_trial, "_seconds", lambda product: product())
    seconds = {1: 1.0} | dict.fromkeys(range(2, blas_trial.MAX_APART + 1), 1.1 * n_rows)
    assert blas_trial._rows_apart(seconds.__getitem__) == n_rows


@linux_cpu
@pytest.mark.parametrize("what", ["trial", "processor", "cpus", "quota", "files", "settings"])
def test_a_choice_made_for_something_else_is_measured_again(tmp_path, found, what, measured):
    blas.choose(tmp_path, found[:1])
    choice = kept(tmp_path)
    true = choice["depends"][what]
    choice["depends"][what] = "another"
    keep(tmp_path, choice)
    assert blas.choose(tmp_path, found[:1]) == found[0]
    assert kept(tmp_path)["depends"][what] == true
    assert len(measured) == 2


@linux_cpu
@pytest.mark.parametrize("choice", [None, 7, [], "x", {"depends": {}}, {"threads": 999}])
def test_a_damaged_choice_is_measured_over(tmp_path, found, choice, measured):
    """Or one of a thread count that is not offered any more."""
    if choice == {"threads": 999}:
        blas.choose(tmp_path, found[:1])
        choice = kept(tmp_path) | choice
    keep(tmp_path, choice)
    assert blas.choose(tmp_path, found[:1]) == found[0]
    assert kept(tmp_path)["threads"] == found[0].threads


@linux_cpu
def test_a_home_that_cannot_be_written_is_no_error(tmp_path, found, measured):
    (tmp_path / "file").touch()
    assert blas.choose(tmp_path / "file", found[:1]) == found[0]


def test_a_file_that_is_no_library_is_never_chosen(tmp_path):
    broken = tmp_path / "libopenblas.so.0"
    broken.write_bytes(b"not a library")
    assert blas.choose(tmp_path, [Setting("openblas", "built-in", 1, (str(broken),))]) is None
    assert not (tmp_path / "machine.json").exists()


def test_a_library_without_products_is_never_chosen():
    assert blas.trial(Setting("openblas", "built-in", 1, ("libc.so.6",))) is None


def test_a_chosen_library_that_does_not_load_is_an_error_that_says_what_to_do():
    with pytest.raises(BadInput, match=r"does not load .*set KEEPWARM_BLAS to another, or to none"):
        blas._load(Setting("openblas", "built-in", 1, ("/nowhere/libopenblas.so.0",)))


@linux_cpu
def test_in_use_tells_what_is_loaded(tmp_path, found):
    for setting in {(s.name, s.threads): s for s in found}.values():
        asked = {"KEEPWARM_BLAS": setting.name, "KEEPWARM_BLAS_THREADS": str(setting.threads)}
        report = child(tmp_path, **asked)
        used = report["blas"]
        assert (used["name"], used["threads"]) == (setting.name, setting.threads)
        assert Path(used["path"]).samefile(setting.libraries[-1])
        assert str(Path(used["path"]).resolve()) in report["maps"]
        assert SLEEP_WHEN_IDLE[setting.name].items() <= report["environ"].items()
    assert not (tmp_path / "machine.json").exists()  # nothing was left to measure


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return child(tmp_path_factory.mktemp("home"), KEEPWARM_BLAS="none")


def test_none_gives_the_slow_path_and_the_default_is_clearly_faster(tmp_path, slow):
    """Where MLX brings its own fast products (Metal, CUDA) nothing is loaded either way."""
    fast = child(tmp_path)
    assert slow["blas"] is None
    assert (fast["blas"] is not None) == blas.wanted()
    assert fast["gflops"] > slow["gflops"] * (3 if blas.wanted() else 0.3)


WARNED = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    blas.start()
said = [str(warning.message) for warning in caught]
"""


@linux_cpu
def test_a_start_after_our_own_import_of_mlx_is_in_time(tmp_path, found, slow):
    """Rooms that import MLX bind its BLAS late, so importing them loads and measures nothing."""
    late = "import keepwarm.kv\nimport keepwarm.engine.engine\n" + REPORT
    fast = child(tmp_path, late, **first(found))
    assert fast["blas"] is not None
    assert fast["gflops"] > 3 * slow["gflops"]


@linux_cpu
def test_mlx_imported_before_us_is_one_clear_warning(tmp_path, found):
    """It cannot be mended any more: the symbol is bound."""
    early = "import mlx.core\nfrom keepwarm import blas\n" + WARNED
    report = child(tmp_path, early + "import json; print(json.dumps([said, blas.in_use()]))")
    assert report == [[blas.TOO_LATE], None]
    assert not (tmp_path / "machine.json").exists()
    later = early.replace("import mlx.core\n", "import keepwarm.kv, mlx.core\n")
    later += "import json; print(json.dumps([said, blas.in_use().name]))"
    assert child(tmp_path, later, **first(found)) == [[], found[0].name]


IMPORTING = """
import json, sys, keepwarm.text.request
has_mlx = "mlx.core" in sys.modules
import keepwarm.kv, keepwarm.engine.engine
from keepwarm import blas
print(json.dumps([has_mlx, blas.in_use()]))
"""


def test_importing_does_no_work(tmp_path):
    """No BLAS is loaded or measured, no file written; the words of a request need no MLX."""
    assert child(tmp_path, IMPORTING) == [False, None]
    assert list(tmp_path.iterdir()) == []


@linux_cpu
def test_a_second_start_keeps_the_first(tmp_path, found):
    again = """
import json, os
from keepwarm import blas
blas.start()
before = blas.in_use()
del os.environ["KEEPWARM_BLAS"], os.environ["KEEPWARM_BLAS_THREADS"]
blas.start()
print(json.dumps([before is not None, blas.in_use() == before]))
"""
    assert child(tmp_path, again, **first(found)) == [True, True]
    assert not (tmp_path / "machine.json").exists()
