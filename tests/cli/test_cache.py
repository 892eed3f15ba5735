"""`keepwarm cache …` on a store filled by real runs."""

import io
import json
import os
import pty
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from contextlib import closing

import pytest

from keepwarm import progress
from keepwarm.agents import agent_store
from keepwarm.agents.agent_store import AgentStore
from keepwarm.store.disk.disk import DiskLimits
from keepwarm.units import format_bytes
from tests.agents.test_signing import write_keys
from tests.cli import command, environment, keepwarm_here
from tests.kit.checkpoints import write_checkpoint
from tests.store.kit import chain_of, files_under


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home with a checkpoint and an agent that has answered once."""
    home = tmp_path_factory.mktemp("home")
    write_checkpoint(home / "model")
    run(home, "the quick brown fox " * 90, "--agent", "coder")
    return home


def run(home, prompt, *options):
    arguments = ["run", prompt, "--model", str(home / "model"), "--max-tokens", "4", "--json"]
    return json.loads(keepwarm_here(*arguments, *options, home=home).stdout)


def cache(home, *arguments, code=0):
    done = keepwarm_here("cache", *arguments, home=home)
    assert done.returncode == code, done.stderr
    return done.stdout.decode()


def cache_json(home, *arguments, code=0):
    return json.loads(cache(home, *arguments, "--json", code=code))


def store(home):
    return home / "store"


def test_path_stats_and_ls_agree(home):
    assert store(home).is_dir()
    (agent,) = cache_json(home, "ls")
    assert (agent["id"], agent["turns"], agent["pinned"]) == ("coder", 1, False)
    assert "coder" in cache(home, "ls")
    stats = cache_json(home, "stats")
    assert stats["blocks"] >= 2
    assert 0 < agent["n_bytes"] <= stats["n_bytes"] <= stats["max_bytes"]
    assert sum(stats["written_by_day"].values()) > 0


@pytest.mark.parametrize("verb", ["stats", "verify"])
def test_figures_have_words_for_names(home, verb):
    shown = cache(home, verb)
    assert not re.search(r"^\w*_\w*:", shown, re.MULTILINE)
    assert re.search(r"^size: \d+(\.\d)? KiB$", shown, re.MULTILINE)
    if verb == "stats":
        assert re.search(r"^limit: 20\.0 GiB$", shown, re.MULTILINE)
        assert re.search(r"^hit rate: \d+\.\d %$", shown, re.MULTILINE)
        requests, cold = re.search(r"^requests: (\d+) \((.*)(\d+) cold\)$", shown, re.M).group(1, 3)
        assert int(requests) >= int(cold) > 0
    else:
        assert "\ndamaged: 0\n" in shown


def test_pin_quota_fork_and_rewind(home):
    assert cache_json(home, "set", "coder", "--pin")["pinned"]
    changed = cache_json(home, "set", "coder", "--unpin", "--quota", "1000000")
    assert (changed["pinned"], changed["quota_bytes"]) == (False, 1000000)
    assert cache_json(home, "fork", "coder", "branch")["forked_from"] == "coder"
    assert cache_json(home, "rewind", "branch", "0")["n_tokens"] == 0
    assert cache_json(home, "rm", "branch")["removed_blocks"] == 0, "all of it is coder's"
    assert [agent["id"] for agent in cache_json(home, "ls")] == ["coder"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "nobody"], "There is no agent 'nobody'"),
        (["rm", "../../etc/passwd"], "is not an agent id"),
        (["rewind", "coder", "9"], "there is no turn 9"),
        (["import", "missing.kw"], "There is no file missing.kw.\n"),
        (["import", "missing.safetensors"], "There is no file missing.safetensors.\n"),
        (["import", "x" * 300], f"{'x' * 300} cannot be read: File name too long.\n"),
        (["import", "/"], "/ is a directory; name a file in it.\n"),
    ],
)
def test_bad_input_is_one_sentence(arguments, says, home):
    model = ["--model", str(home / "model")] if arguments[0] == "import" else []
    done = keepwarm_here("cache", *arguments, *model, home=home)
    assert done.returncode == 2
    assert says in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_verify_finds_and_fixes_a_flipped_byte(home, tmp_path):
    home = shutil.copytree(home, tmp_path / "home")
    assert cache_json(home, "verify")["bad"] == []
    path = next(p for p in files_under(store(home) / "blocks"))
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    (bad,) = cache_json(home, "verify", code=1)["bad"]
    assert "does not match its digest" in bad["reason"]
    assert path.exists(), "verify alone changes nothing"
    cache_json(home, "verify", "--fix", code=1)
    assert not path.exists()
    assert cache_json(home, "verify")["bad"] == []
    assert cache_json(home, "gc")["quarantine_bytes"] >= len(data)


@pytest.fixture
def verified(main_here, tmp_path):
    """A function: the output of `verify` on a store with two blocks."""
    with AgentStore(tmp_path / "store", DiskLimits(min_free_bytes=0)) as disk_store:
        for made in chain_of(2):
            assert disk_store.disk.put(made).stored

    def verify(*options):
        code, out, _ = main_here("cache", "verify", "--json", *options)
        bad = json.loads(out)["bad"]
        assert code == bool(bad)
        return bad

    return verify


@pytest.mark.parametrize("options", [[], ["--fix"]])
def test_verify_names_what_cannot_be_read_and_leaves_it(options, verified, tmp_path):
    """A symlink to itself cannot be opened, not even by root."""
    path = next(files_under(tmp_path / "store" / "blocks"))
    aside = path.rename(tmp_path / "aside")
    path.symlink_to(path)
    (bad,) = verified(*options)
    assert (bad["reason"].startswith("could not be read: "), bad["quarantined"]) == (True, False)
    path.unlink()
    aside.rename(path)
    assert verified() == []


def test_verify_quarantines_a_torn_agent(verified, tmp_path):
    path = tmp_path / "store" / "agents" / "torn.json"
    path.write_text("{")
    assert [bad["quarantined"] for bad in verified()] == [False]
    assert path.exists(), "verify alone changes nothing"
    (bad,) = verified("--fix")
    assert (bad["record"], bad["quarantined"]) == ("agents/torn.json", True)
    assert not path.exists()
    left, why = sorted((tmp_path / "store" / "quarantine").iterdir())
    assert (left.read_text(), why.read_text()) == ("{", f"{bad['reason']}\n")
    assert verified() == []


def test_verify_leaves_an_agent_that_cannot_be_read(verified, tmp_path):
    path = tmp_path / "store" / "agents" / "looped.json"
    path.symlink_to(path)
    (bad,) = verified("--fix")
    assert (bad["reason"].startswith("could not be read: "), bad["quarantined"]) == (True, False)
    assert path.is_symlink()


def test_an_agent_travels_in_one_file(home, tmp_path):
    prompt = "a story that travels " * 80
    first = run(home, prompt, "--agent", "traveller")
    bundle = tmp_path / "traveller.kw"
    assert cache_json(home, "export", "traveller", str(bundle))["records"] >= 2
    away = tmp_path / "away"
    away.mkdir()
    (away / "model").symlink_to(home / "model")
    cache(away, "import", str(bundle), "--model", str(away / "model"))
    assert [agent["model"] for agent in cache_json(away, "ls")] == [str(away / "model")]
    assert run(away, prompt)["usage"]["cached_tokens"] == 0, "nobody here vouches for it"
    again = run(away, prompt, "--agent", "traveller")
    assert again["usage"]["inexact"] == ["imported"]
    assert again["usage"]["cached_tokens"] == first["usage"]["prompt_tokens"] - 1
    assert again["text"] == first["text"]
    write_checkpoint(tmp_path / "other", seed=3)
    asked = "cache", "import", str(bundle), "--model", str(tmp_path / "other"), "--agent", "b"
    done = keepwarm_here(*asked, home=away)
    assert done.returncode == 2
    assert "weights differ" in done.stderr.decode()


def test_a_bundle_serves_only_its_agent_unless_a_trusted_key_signed_it(main_here, tmp_path):
    private, public = write_keys(tmp_path / "signing")
    model = "--model", write_checkpoint(tmp_path / "model")
    asked = "run", "a story that is signed " * 30, *model, "--max-tokens", 3, "--json"
    main_here(*asked, "--agent", "a")
    bundle = tmp_path / "a.kw"
    assert main_here("cache", "export", "a", bundle, "--sign", private)[0] == 0
    assert main_here("cache", "rm", "a")[0] == 0

    def made(agent, *options):
        asked = "cache", "import", bundle, *model, "--agent", agent, *options, "--json"
        out = main_here(*asked)[1]
        assert json.loads(out)["model"] == str(model[1])
        return json.loads(out)["imported"]

    assert made("stranger") is True
    assert made("friend", "--trust", public) is False
    usage = json.loads(main_here(*asked)[1])["usage"]
    assert (usage["prefilled_tokens"], usage["exact"]) == (1, True)
    assert "imported" in main_here("cache", "ls")[1]


def test_an_agent_with_rounded_keys_travels_too(main_here, tmp_path):
    """The bundle records its KV options, so import needs no flag for them."""
    model = "--model", write_checkpoint(tmp_path / "wide", shape={"head_dim": 64})
    asked = "run", "a story told in eight bits " * 70, *model, "--max-tokens", 3, "--json"
    first = json.loads(main_here(*asked, "--kv-bits", 8, "--agent", "a")[1])
    assert main_here("cache", "export", "a", tmp_path / "a.kw")[0] == 0
    assert main_here("cache", "rm", "a")[0] == 0
    code, _, error = main_here("cache", "import", tmp_path / "a.kw", *model)
    assert (code, error) == (0, "")
    again = json.loads(main_here(*asked, "--kv-bits", 8, "--agent", "a")[1])
    assert again["usage"]["inexact"] == ["quantised", "imported"]
    assert again["usage"]["cached_tokens"] == first["usage"]["prompt_tokens"] - 1
    assert again["text"] == first["text"]


def test_what_a_bundle_needs_is_said_before_anything_is_downloaded(main_here, tmp_path):
    model = "--model", write_checkpoint(tmp_path / "tiny")
    main_here("run", "a story", *model, "--max-tokens", 2, "--agent", "a")
    main_here("cache", "set", "a", "--note", "a story")
    main_here("cache", "export", "a", tmp_path / "a.kw")
    code, out, error = main_here("cache", "import", tmp_path / "a.kw", "--agent", "b")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert re.search(r"a\.kw needs tiny, weights [0-9a-f]{32}; name that model", error)
    assert not (tmp_path / "models").exists()
    asked = "cache", "import", tmp_path / "a.kw", "--agent", "b", *model, "--json"
    assert json.loads(main_here(*asked)[1])["metadata"] == {"note": "a story"}


@pytest.mark.parametrize("form", ["bundle", "mlx-lm"])
def test_a_taken_name_is_said_before_a_model_is_loaded(form, main_here, monkeypatch, tmp_path):
    model = "--model", write_checkpoint(tmp_path / "tiny")
    main_here("run", "a story", *model, "--max-tokens", 2, "--agent", "a")
    file = tmp_path / ("a.kw" if form == "bundle" else "a.safetensors")
    named = () if form == "bundle" else model
    assert main_here("cache", "export", "a", file, "--format", form, *named)[0] == 0
    monkeypatch.delattr("keepwarm.cli.cache.load_model")
    for name, says in ((), "'a' already exists"), (("--agent", "no id"), "not an agent id"):
        code, _, error = main_here("cache", "import", file, *model, *name)
        assert (code, error.count("\n")) == (2, 1)
        assert says in error


@pytest.mark.parametrize(
    ("setting", "says"),
    [("DISK_BYTES", "there is no room"), ("DISK_WRITES_PER_DAY", "what is left of today's writes")],
)
def test_a_bundle_that_may_not_be_kept_is_one_sentence(
    setting, says, main_here, monkeypatch, tmp_path
):
    model = "--model", write_checkpoint(tmp_path / "model")
    main_here("run", "a story", *model, "--max-tokens", 2, "--agent", "a")
    main_here("cache", "export", "a", tmp_path / "a.kw")
    main_here("cache", "rm", "a")
    monkeypatch.setenv(f"KEEPWARM_{setting}", "1000")
    code, out, error = main_here("cache", "import", tmp_path / "a.kw", *model)
    assert (code, out) == (2, "")
    assert says in error
    assert error.count("\n") == 1
    assert main_here("cache", "ls", "--json")[1] == "[]\n"


def test_labels_retention_and_several_forks(home):
    cache(home, "fork", "coder", "f1", "f2")
    several = cache_json(home, "fork", "coder", "n", "--count", "2")
    assert [made["id"] for made in several] == ["n-1", "n-2"]
    arguments = ("--label", "team=web", "--note", "of the demo", "--retention", "60")
    changed = cache_json(home, "set", "f1", *arguments)
    assert changed["metadata"] == {"team": "web", "note": "of the demo"}
    assert changed["retention_s"] == 60
    changed = cache_json(home, "set", "f1", "--label", "team=", "--retention", "0")
    assert (changed["metadata"], changed["retention_s"]) == ({"note": "of the demo"}, None)
    listed = {row["id"]: row["model"] for row in cache_json(home, "ls")}
    assert listed["f1"] == listed["coder"] == str(home / "model")
    for name in ("f1", "f2", "n-1", "n-2"):
        cache(home, "rm", name)


def test_clear_without_a_terminal_needs_yes(home, tmp_path):
    shutil.copytree(home / "store", tmp_path / "store")
    refused = keepwarm_here("cache", "clear", home=tmp_path)
    assert refused.returncode == 2
    assert b"without a terminal it needs --yes" in refused.stderr
    assert cache_json(tmp_path, "ls")
    assert cache_json(tmp_path, "clear", "--yes")["removed_agents"] >= 1
    assert cache_json(tmp_path, "stats")["blocks"] == 0
    assert cache_json(tmp_path, "gc")["empty_agents"] == []


def test_an_agent_is_shown_with_dates_names_and_sizes(main_here, home):
    def told(*arguments):
        code, out, err = main_here("cache", *arguments, home=home)
        assert (code, err) == (0, "")
        return out

    def shown():
        return dict(line.split(": ", 1) for line in told("show", "coder").splitlines())

    kept, before = json.loads(told("show", "coder", "--json")), shown()
    assert before["agent"] == kept["id"] == "coder"
    assert before["model"] == kept["model"]
    assert before["tokens"] == str(kept["n_tokens"])
    for name in ("created", "used"):
        assert before[name] == time.strftime("%Y-%m-%d %H:%M", time.localtime(kept[name]))
    assert before["size"] == format_bytes(kept["n_bytes"])
    assert before["retention"] == "kept until evicted or deleted"
    told("set", "coder", "--retention", 3 * 86400, "--label", "team=a\x1b[2J\tb")
    told("set", "coder", "--quota", "2G")
    after = shown()
    assert after["retention"] == "deleted when unused for 3 days"
    assert (after["labels"], after["quota"]) == ("team=a [2J b", format_bytes(2 << 30))
    told("set", "coder", "--retention", "0", "--label", "team=")
    told("set", "coder", "--quota", "0")


def test_an_existing_file_is_replaced_only_by_force(main_here, home, tmp_path):
    file = tmp_path / "a.kw"
    file.write_text("mine")
    code, out, err = main_here("cache", "export", "coder", file, home=home)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"\S+a\.kw exists; [^\n]* --force\.\n", err)
    assert file.read_text() == "mine"
    assert main_here("cache", "export", "coder", file, "--force", home=home)[0] == 0
    assert file.stat().st_size > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["a.kw"]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("there", r"there is a directory; name a file in it\."),
        ("nowhere/a.kw", r"The directory of \S+ does not exist; create it first\."),
        (f"{'x' * 253}.kw", r"cannot be written: File name too long; nothing was exported\."),
    ],
)
def test_what_cannot_be_written_is_one_sentence(main_here, home, tmp_path, target, says):
    (tmp_path / "there").mkdir()
    code, out, err = main_here("cache", "export", "coder", tmp_path / target, home=home)
    assert (code, out) == (2, "")
    assert re.search(says, err)
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("form", ["bundle", "mlx-lm"])
def test_what_is_no_regular_file_is_neither_replaced_nor_waited_for(
    main_here, home, tmp_path, form
):
    """As /dev/null, or a pipe; and a link leads to one, or to nothing."""
    pipe, linked, dangling = (tmp_path / f"{name}.safetensors" for name in ("p", "l", "d"))
    os.mkfifo(pipe)
    linked.symlink_to(pipe)
    dangling.symlink_to(tmp_path / "nothing")

    def there():
        return {path: (path.lstat().st_ino, path.lstat().st_mtime) for path in tmp_path.iterdir()}

    before = there()
    for file in (pipe, linked, dangling):
        asked = "cache", "export", "coder", file, "--force", "--format", form
        code, out, err = main_here(*asked, home=home)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "is not a regular file; choose another name" in err
    assert there() == before
    code, out, err = main_here("cache", "import", pipe, home=home)
    assert (code, out, err) == (2, "", f"{pipe} is not a regular file; name one.\n")


def test_an_export_that_is_stopped_leaves_nothing(main_here, monkeypatch, home, tmp_path):
    """SIGTERM between two records."""

    def stopped(*_):
        yield b"half"
        os.kill(os.getpid(), signal.SIGTERM)
        yield b"whole"

    made = agent_store.BundleExport(1, stopped())
    monkeypatch.setattr(agent_store, "export_bundle", lambda *_: made)
    before = signal.getsignal(signal.SIGTERM)
    code, out, _ = main_here("cache", "export", "coder", tmp_path / "a.kw", home=home)
    assert (code, out) == (128 + signal.SIGTERM, "")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("size", ["2X", "-1", "much"])
def test_a_quota_that_is_no_size_is_one_sentence(main_here, home, size):
    code, _, err = main_here("cache", "set", "coder", "--quota", size, home=home)
    assert (code, err) == (2, f"{size!r} is not a size; write it as 2G, 500MB or in bytes.\n")


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_a_retention_that_is_none_is_one_sentence(main_here, home, seconds):
    code, out, err = main_here("cache", "set", "coder", f"--retention={seconds}", home=home)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"--retention is {seconds}; it is from 0 to " in err


def test_first_tokens_or_turns_of_an_agent_travel_in_one_file(home, tmp_path):
    run(home, "a long way to go for a story " * 60, "--agent", "part")
    n_tokens = cache_json(home, "show", "part")["n_tokens"]
    away = tmp_path / "away"
    away.mkdir()
    (away / "model").symlink_to(home / "model")
    bundle = str(tmp_path / "a.kw")
    assert cache_json(home, "export", "part", bundle, "--turn", "1")["records"] == (
        -(-n_tokens // 256)
    )
    assert cache_json(home, "export", "part", bundle, "--tokens", "300", "--force")["records"] == 2
    made = cache_json(away, "import", bundle, "--model", str(away / "model"))
    assert (made["id"], made["n_tokens"]) == ("part", 300)
    done = keepwarm_here("cache", "export", "part", str(tmp_path / "x"), "--turn", "7", home=home)
    assert (done.returncode, b"there is no turn 7" in done.stderr) == (2, True)
    cache(home, "rm", "part")


def test_progress_is_shown_on_a_terminal_only(home):
    """Never on stdout, and only if stderr is a terminal."""
    done = keepwarm_here("cache", "verify", "--json", home=home)
    assert done.stderr == b""
    screen, device = pty.openpty()
    done = subprocess.run(
        command("cache", "verify", "--json"),
        stdout=subprocess.PIPE,
        stderr=device,
        env=environment(home, TERM="xterm"),
        check=True,
    )
    os.close(device)
    assert "verifying" in os.read(screen, 10_000).decode()
    os.close(screen)
    assert json.loads(done.stdout)["bad"] == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_was_imported_is_shown_behind_the_progress(home, main_here, monkeypatch, tmp_path):
    """On a screen, the line of the bar is cleared first; it counts in KiB and MiB."""
    cache(home, "export", "coder", str(tmp_path / "a.kw"))
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", screen)
    asked = "cache", "import", tmp_path / "a.kw", "--model", home / "model"
    assert main_here(*asked)[0] == 0
    before, _, _ = screen.getvalue().partition("agent: coder")
    assert before.endswith(progress.CLEAR)
    assert re.search(r"importing .* of \S+ [KM]iB \(\d+ %\)", before)


def test_a_store_of_a_newer_keepwarm_is_one_sentence(home):
    index = store(home) / "index.sqlite"
    with closing(sqlite3.connect(index)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        db.execute(f"PRAGMA user_version = {version + 1}")
    done = keepwarm_here("cache", "ls", home=home)
    assert done.returncode == 2
    assert b"was written by a newer Keepwarm; update this one" in done.stderr
    assert b"Traceback" not in done.stderr
    with closing(sqlite3.connect(index)) as db:
        db.execute(f"PRAGMA user_version = {version}")
    cache(home, "ls")
