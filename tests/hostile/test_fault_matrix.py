"""Every tier and every fault: no wrong tensor, and the process keeps serving.

The table of expectations below is tested, and written to `docs/results/faults.md`:

    python -m tests.hostile.test_fault_matrix
"""

import errno
import os
import random
import resource
import shutil
import signal
import sqlite3
import struct
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mlx_lm.models.cache import make_prompt_cache

from keepwarm.agents.agent_store import AgentStore
from keepwarm.cache.restore.loading import Reader
from keepwarm.cache.restore.rates import Rates
from keepwarm.cache.restore.restorer import Restorer
from keepwarm.cache.restore.writing import MemorySaver, Writer
from keepwarm.errors import BadInput, StoreFailed
from keepwarm.kv.layout import probe
from keepwarm.prefix.blocks import BlockKey, Namespace, chain
from keepwarm.prefix.fingerprint import FORMAT_VERSION, Identity, namespace
from keepwarm.records.cipher import stored_namespace
from keepwarm.records.record import Part, Record, encode_record
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from keepwarm.store.marker import unlock
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tiers import Tiers
from tests.kit.compare import assert_same
from tests.kit.runs import cold, continue_from, prefill, prompt_of
from tests.store.disk.crash import fast_directory
from tests.store.kit import BrokenFiles

PAGE = Path(__file__).parents[2] / "docs" / "results" / "faults.md"
IDENTITY = Identity(weights={"model": "11"}, config="22", tokenizer="33", layout="44", salt="a")
COLUMNS = ("memory", "disk", "memory + disk")
KEY = b64encode(bytes(range(32))).decode()
N = 3  # tokens generated to compare
NOBODY = 65534  # the id of a user without files

PROMPT = prompt_of(600, seed=1)  # blocks 0 and 1, and a tail; the fault damages block 1
SIBLING = PROMPT[:512] + prompt_of(120, seed=2)
OTHER = prompt_of(300, seed=3)  # shares nothing, and is never touched
NEW = prompt_of(280, seed=4)  # computed while the fault lasts
ALL = len(PROMPT) - 1
BEFORE_IT = 256


class Cell(NamedTuple):
    """How many tokens are reused while a fault lasts, and what the page says about it."""

    outcome: str
    prompt: int = ALL
    other: int = len(OTHER) - 1
    new: int = len(NEW) - 1
    reason: str = ""  # of the quarantine


HIT = Cell("hit")
MEMORY_HIT = Cell("hit, from memory")
NOT_KEPT = Cell("hit; new blocks are not stored", new=0)
NO_FILE: None = None  # memory has no files that could be damaged


def miss(reason: str, prompt: int = BEFORE_IT) -> Cell:
    return Cell(f"miss from token {prompt}; quarantined: “{reason}”", prompt, reason=reason)


@dataclass
class Scene:
    """One store under test, with three prompts in it."""

    column: str
    root: Path
    model: Any
    layout: Any
    files: BrokenFiles = field(default_factory=BrokenFiles)
    identity: Identity = IDENTITY
    repair: Callable[[], None] | None = None
    secret: str | None = None  # of an encrypted store

    def open(self) -> None:
        self.cipher = unlock(self.root, self.secret, self.files)
        self.memory = MemoryTier(1 << 30) if "memory" in self.column else None
        self.disk: DiskTier | None = None
        tiers: list[Any] = [("memory", self.memory)] if self.memory else []
        self.saver: Any = MemorySaver(self.memory) if self.memory else None
        if "disk" in self.column:
            limits = DiskLimits(min_free_bytes=0)
            self.disk = DiskTier(self.root, limits, self.files, cipher=self.cipher)
            self.saver = Writer(self.memory, self.disk, 1 << 30)
            tiers += [("disk", self.disk), ("queue", self.saver.queued)]
        self.tiers = Tiers(tiers)
        self.reader = Reader(self.tiers, n_threads=2)

    def close(self) -> None:
        self.saver.close()
        self.reader.close()
        for tier in (self.memory, self.disk):
            if tier is not None:
                tier.close()

    def restart(self) -> None:
        self.close()
        self.open()

    def restorer(self) -> Restorer:
        rates = Rates(load_bytes_per_s=1e12, prefill_tokens_per_s=1e-3)
        name = self.name(self.identity)
        return Restorer(name, self.layout, self.tiers, self.reader, self.saver, rates)

    def serve(self, prompt: list[int]) -> None:
        """A request: restore, compute the rest, store it."""
        restorer = self.restorer()
        restored = restorer.restore(prompt)
        capture = restorer.open(prompt)
        caches, at = restored.caches or make_prompt_cache(self.model), restored.n_tokens
        capture.start_at(at)
        if restorer.needs.checkpoints and at < len(prompt) - 1:
            at, start = len(prompt) - 1, at
            prefill(self.model, caches, prompt[start:at])
            capture.capture(caches, at, checkpoint=True)
        capture.finish(prompt, prefill(self.model, caches, prompt[at:]))
        self.saver.flush()

    def reuse(self, prompt: list[int], reference: Any) -> int:
        """Tokens of a prompt that are restored; the continuation must equal a cold run."""
        restored = self.restorer().restore(prompt)
        caches = restored.caches or make_prompt_cache(self.model)
        run = continue_from(self.model, caches, prompt[restored.n_tokens :], N)
        assert_same(reference(tuple(prompt)), run)
        return restored.n_tokens

    def name(self, identity: Identity = IDENTITY) -> Namespace:
        return stored_namespace(self.cipher, namespace(identity))

    def key(self, number: int, prompt: list[int] = PROMPT) -> BlockKey:
        return list(chain(self.name(), prompt))[number].key

    def rewrite(self, record: Record, **changes: Any) -> None:
        """Replace the damaged record by one with another header."""
        changed = replace(record, header=replace(record.header, **changes))
        self.path().write_bytes(b"".join(encode_record(changed, self.cipher)))

    def path(self, number: int = 1, prompt: list[int] = PROMPT) -> Path:
        """The file of a block; by default of the damaged one."""
        assert self.disk is not None
        return self.disk.records.path_of(self.key(number, prompt), Part.DELTA)

    def mend(self) -> None:
        self.files.mend()
        self.identity = IDENTITY
        repair, self.repair = self.repair, None
        if repair:
            repair()


Damage = Callable[[Scene], None]


class Fault(NamedTuple):
    name: str
    damages: tuple[Damage, ...]  # each tried in turn, with a repair in between
    memory: Cell | None
    disk: Cell
    both: Cell

    def cell(self, column: str) -> Cell | None:
        return dict(zip(COLUMNS, self[2:], strict=True))[column]


# Faults of one record


def rewrite(change: Callable[[bytearray], bytes]) -> Damage:
    def damage(scene: Scene) -> None:
        path = scene.path()
        path.write_bytes(change(bytearray(path.read_bytes())))

    return damage


def flip(at: float) -> Damage:
    """One bit, at a fraction of the file; 0 is the header's length, 1 the last byte of V."""

    def change(data: bytearray) -> bytes:
        data[round(at * (len(data) - 1))] ^= 1
        return bytes(data)

    return rewrite(change)


def cut(at: float) -> Damage:
    return rewrite(lambda data: bytes(data[: round(at * (len(data) - 1))]))


def swap(scene: Scene) -> None:
    one, two = scene.path(0), scene.path(1)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def duplicate(scene: Scene) -> None:
    """Under the name of a block that does not exist; a start finds the file and checks it."""
    copy = scene.path(0, prompt_of(256, seed=9))
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(scene.path(), copy)
    scene.restart()


def of_other_weights(scene: Scene) -> None:
    """The same tokens, computed by another model, under this name."""
    record = scene.disk.read(scene.key(1), Part.DELTA)
    stale = scene.name(replace(IDENTITY, weights={"model": "12"}))
    scene.rewrite(record, namespace=stale)


def newer(scene: Scene) -> None:
    """As a newer Keepwarm would write it; the repair is to update this one."""
    path = scene.path()
    before = path.read_bytes()
    scene.rewrite(scene.disk.read(scene.key(1), Part.DELTA), version=FORMAT_VERSION + 1)
    newer = path.read_bytes()

    def update() -> None:
        assert path.read_bytes() == newer, "it was touched"
        assert not list((scene.root / "quarantine").iterdir()), "it was quarantined"
        path.write_bytes(before)

    scene.repair = update


def huge_header(data: bytearray) -> bytes:
    return struct.pack("<Q", 1 << 60) + data[8:]


def directory(scene: Scene) -> None:
    scene.path().unlink()
    scene.path().mkdir()


# Faults of the whole tier


def another(**changes: Any) -> Damage:
    """The same prompt under another identity."""

    def damage(scene: Scene) -> None:
        scene.identity = replace(IDENTITY, **changes)

    return damage


def failing(code: int, *operations: str) -> Damage:
    def damage(scene: Scene) -> None:
        scene.files.break_(code, *operations)

    return damage


def index_read_only(scene: Scene) -> None:
    index_pragma(scene, "query_only = ON")
    scene.repair = lambda: index_pragma(scene, "query_only = OFF")


def all_read_only(scene: Scene) -> None:
    scene.files.break_(errno.EROFS, *WRITES)
    index_read_only(scene)


def no_page_more(scene: Scene) -> None:
    """Neither a record nor a page of the index finds room."""
    scene.files.break_(errno.ENOSPC, "write")
    index_pragma(scene, "max_page_count = 1")  # as many as there are
    scene.repair = lambda: index_pragma(scene, "max_page_count = 1000000000")


def index_pragma(scene: Scene, pragma: str) -> None:
    scene.disk.index.database.execute(f"PRAGMA {pragma}")


def nothing_written(scene: Scene) -> None:
    """The system itself refuses every write to every file."""
    scene.repair = refuse_all_bytes()


def refuse_all_bytes() -> Callable[[], None]:
    """No write of this process succeeds; returns a function that ends that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


def slow(scene: Scene) -> None:
    scene.files.read_delay_s = 0.03


def index_of(scene: Scene) -> list[Path]:
    return [path for path in scene.root.iterdir() if path.name.startswith("index.sqlite")]


def index_deleted(scene: Scene) -> None:
    scene.close()
    for path in index_of(scene):
        path.unlink()
    scene.open()


def index_deleted_under_way(scene: Scene) -> None:
    for path in index_of(scene):
        path.unlink()


def index_corrupt(scene: Scene) -> None:
    scene.close()
    for path in index_of(scene):
        data = path.read_bytes()
        path.write_bytes(data[:4000] + random.Random(1).randbytes(max(0, len(data) - 4000)))
    scene.open()


def index_garbage(scene: Scene) -> None:
    scene.close()
    for path in index_of(scene):
        path.write_bytes(b"no index" * 1000)
    scene.open()


def index_lies(scene: Scene) -> None:
    """The tails of two conversations are listed under each other's tokens."""
    ours, theirs = scene.key(2), scene.key(2, SIBLING)
    with sqlite3.connect(scene.root / "index.sqlite") as db:
        db.execute("UPDATE tokens SET key = CASE key WHEN ? THEN ? ELSE ? END WHERE key IN (?, ?)",
                   (ours, theirs, ours, ours, theirs))  # fmt: skip
    db.close()
    scene.repair = lambda: index_deleted(scene)


WRITES = ("make_directory", "write", "publish", "remove")
MISSED = Cell("miss: another namespace", 0, 0, len(NEW) - 1)
UNREADABLE = Cell("miss meanwhile, hit afterwards", 0, 0, 0)
REPAIRED = Cell("hit after a rebuild from the files")

FAULTS = (
    Fault("flip one byte anywhere", tuple(flip(n / 3) for n in range(4)), NO_FILE,
          miss("does not match its digest"), MEMORY_HIT),
    Fault("truncate", (cut(0.25), cut(1)), NO_FILE,
          miss("its header says"), MEMORY_HIT),
    Fault("swap two files", (swap,), NO_FILE, miss("it is another record under this name", 0),
          MEMORY_HIT),
    Fault("duplicate under another key", (duplicate,), NO_FILE,
          Cell("hit; the copy is quarantined", reason="it is another record under this name"),
          Cell("hit; the copy is quarantined", reason="it is another record under this name")),
    Fault("a block of stale weights in its place", (of_other_weights,), NO_FILE,
          miss("its key is not the hash of its tokens"), MEMORY_HIT),
    Fault("stale weights", (another(weights={"model": "12"}),), MISSED, MISSED, MISSED),
    Fault("wrong tokenizer", (another(tokenizer="34"),), MISSED, MISSED, MISSED),
    Fault("wrong salt", (another(salt="b"),), MISSED, MISSED, MISSED),
    Fault("newer format", (newer,), NO_FILE,
          Cell("miss from token 256; the file stays for a newer Keepwarm", BEFORE_IT),
          MEMORY_HIT),
    Fault("huge header", (rewrite(huge_header),), NO_FILE, miss("the header claims"), MEMORY_HIT),
    Fault("empty file", (rewrite(lambda data: b""),), NO_FILE, miss("the file is cut short"),
          MEMORY_HIT),
    Fault("directory in place of a file", (directory,), NO_FILE, miss("it is a directory"),
          MEMORY_HIT),
    Fault("file deleted", (lambda scene: scene.path().unlink(),), NO_FILE,
          Cell("miss from token 256", BEFORE_IT), MEMORY_HIT),
    Fault("read-only disk", (failing(errno.EROFS, *WRITES), index_read_only, all_read_only),
          NO_FILE, NOT_KEPT, MEMORY_HIT),
    Fault("ENOSPC", (failing(errno.ENOSPC, "write"), no_page_more, nothing_written), NO_FILE,
          NOT_KEPT, MEMORY_HIT),
    Fault("EIO on writing", (failing(errno.EIO, "publish"),), NO_FILE, NOT_KEPT, MEMORY_HIT),
    Fault("EIO on reading", (failing(errno.EIO, "open"),), NO_FILE, UNREADABLE, MEMORY_HIT),
    Fault("slow read", (slow,), NO_FILE, HIT, MEMORY_HIT),
    Fault("index deleted", (index_deleted,), NO_FILE, REPAIRED, REPAIRED),
    Fault("index deleted while in use", (index_deleted_under_way,), NO_FILE,
          Cell("hit; the next start rebuilds it"), MEMORY_HIT),
    Fault("index corrupt", (index_corrupt, index_garbage), NO_FILE, REPAIRED, REPAIRED),
    Fault("index names another block", (index_lies,), NO_FILE,
          Cell("miss from token 512, until the index is rebuilt", 512), MEMORY_HIT),
)  # fmt: skip


# The test


@contextmanager
def no_hanging(seconds: int = 60) -> Iterator[None]:
    """A request that never ends is a failure too."""

    def ring(*_: Any) -> None:
        raise AssertionError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def reference(model):
    return cache(lambda prompt: cold(model, list(prompt), N))


@pytest.fixture(scope="module")
def warm_store(model, tmp_path_factory):
    """Directories with three prompts in them, to be copied: every cell starts from the same."""

    @cache
    def made(secret: str | None) -> Path:
        root = tmp_path_factory.mktemp("warm") / "store"
        scene = Scene("disk", root, model, layout_of(model), secret=secret)
        scene.open()
        for prompt in (PROMPT, SIBLING, OTHER):
            scene.serve(prompt)
        scene.close()
        return root

    return made


def layout_of(model):
    return probe(model, make_prompt_cache(model))


@pytest.fixture
def scene(request, tmp_path, model, warm_store, reference):
    column, secret = request.param
    made = Scene(column, tmp_path / "store", model, layout_of(model), secret=secret)
    if made.column == "disk":  # memory is filled by computing, not by reading files
        shutil.copytree(warm_store(secret), made.root)
    made.open()
    for prompt in (PROMPT, SIBLING, OTHER):
        made.serve(prompt)
    yield made
    made.mend()
    made.close()


CELLS = [
    pytest.param(
        (column, None),
        fault,
        id=f"{fault.name}-{column}",
        # Memory serves what it holds, whatever is wrong on disk: two of them show it.
        marks=[pytest.mark.soak] if fault.cell(column) is MEMORY_HIT and n > 1 else [],
    )
    for n, fault in enumerate(FAULTS)
    for column in COLUMNS
    if fault.cell(column)
]
SEALED_CELLS = [
    pytest.param(("disk", KEY), fault, id=f"{fault.name}-sealed")
    for fault in FAULTS
    if fault.disk.reason
]


@pytest.mark.parametrize(("scene", "fault"), CELLS + SEALED_CELLS, indirect=["scene"])
def test_the_outcome_is_as_the_page_says(scene, fault, reference):
    """Tokens equal a cold run's, the untouched hit, the process goes on."""
    cell = fault.cell(scene.column)
    with no_hanging():
        for damage in fault.damages:
            assert scene.reuse(PROMPT, reference) == ALL
            damage(scene)
            assert scene.reuse(PROMPT, reference) == cell.prompt
            assert scene.reuse(OTHER, reference) == cell.other
            scene.serve(NEW)
            assert scene.reuse(NEW, reference) == cell.new
            scene.mend()
            scene.serve(PROMPT)
            if scene.reuse(PROMPT, reference) < ALL:  # a second bad record was not read before
                scene.serve(PROMPT)
            assert scene.reuse(PROMPT, reference) == ALL
            assert scene.reuse(OTHER, reference) == len(OTHER) - 1
        if cell.reason:
            assert cell.reason in reasons(scene) or (scene.secret and reasons(scene))


@pytest.mark.parametrize("name", ["gemma3_text", "falcon_h1"])
def test_no_record_of_any_kind_brings_a_wrong_tensor(name, tiny_model, tmp_path):
    """One byte of each record in turn: delta, window and state, of every block."""
    model = tiny_model(name)
    right = cold(model, PROMPT, N)
    scene = Scene("disk", tmp_path / "store", model, layout_of(model))
    scene.open()
    scene.serve(PROMPT)
    n_broken = 0
    for path in sorted((scene.root / "blocks").rglob("*.safetensors")):
        with no_hanging():
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            n_broken += scene.reuse(PROMPT, lambda _: right) < ALL
            scene.serve(PROMPT)
    assert scene.reuse(PROMPT, lambda _: right) == ALL
    assert scene.disk.stats().quarantined >= n_broken > 0
    scene.close()


@contextmanager
def unwritable(root: Path) -> Iterator[None]:
    """Make everything read-only; root becomes another user meanwhile."""
    modes = {path: path.stat().st_mode for path in (root, *root.rglob("*"))}
    for path in modes:
        path.chmod(0o555 if path.is_dir() else 0o444)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        for path, mode in modes.items():
            path.chmod(mode)


@contextmanager
def full() -> Iterator[None]:
    let_write = refuse_all_bytes()
    try:
        yield
    finally:
        let_write()


@pytest.fixture
def copied(request, model, warm_store):
    """A scene whose store lies where any user can read it; nothing is open."""
    with fast_directory() as directory_path:
        Path(directory_path).chmod(0o755)
        root = Path(directory_path) / "store"
        shutil.copytree(warm_store(request.param), root)
        scene = Scene("disk", root, model, layout_of(model), secret=request.param)
        scene.open()
        scene.disk.pin(scene.key(0), "somebody")
        scene.close()
        yield scene


@pytest.mark.parametrize("copied", [None, KEY], indirect=True, ids=["plain", "sealed"])
@pytest.mark.parametrize("is_full", [False, True], ids=["read-only", "full"])
def test_a_start_where_nothing_can_be_written_is_refused(copied, reference, is_full):
    """One sentence says why and what to do, and the store stays as it is."""
    records = {path: path.read_bytes() for path in copied.root.rglob("*.safetensors")}
    expected = (StoreFailed, "look at its disk") if is_full else (BadInput, "another directory")
    fault = full() if is_full else unwritable(copied.root)
    with fault, pytest.raises(expected[0], match=expected[1]):
        AgentStore(copied.root, secret=copied.secret)
    assert {path: path.read_bytes() for path in copied.root.rglob("*.safetensors")} == records
    copied.open()
    assert copied.disk.index.lookups.owners(copied.key(0)), "the index was thrown away"
    assert copied.reuse(PROMPT, reference) == ALL
    copied.close()


def reasons(scene: Scene) -> str:
    return "".join(path.read_text() for path in (scene.root / "quarantine").glob("*.why"))


def test_the_control_a_wrong_block_would_be_noticed(model, reference):
    """If a fault returned rows of another prompt, the comparison with a cold run would fail."""
    wrong = prefill(model, make_prompt_cache(model), SIBLING[: len(SIBLING) - 1])
    with pytest.raises(AssertionError):
        assert_same(reference(tuple(PROMPT)), continue_from(model, wrong, PROMPT[-1:], N))


# The page


INTRO = f"""# Reliability

What happens to a request when the store is damaged or the disk fails. Every cell is a test
(`tests/hostile/test_fault_matrix.py`, which also writes this page): a prompt of {len(PROMPT)}
tokens is stored, its second block or the whole tier is damaged, and the prompt is sent again. In
every case the answer equals that of a cold run, prompts with intact records are restored in full
(unless the fault affects all records), new prompts are served, and after the fault {ALL} of
{len(PROMPT)} tokens are restored again.

A quarantined record is moved to `quarantine/` with the reason beside it, and counted. The column
*disk* also holds for an [encrypted](../security.md) store, with fewer reasons: changed bytes do not
decrypt.

| fault | {" | ".join(COLUMNS)} |
|---|{"---|" * len(COLUMNS)}
"""
OUTRO = """
On a full or read-only disk a running process keeps serving. A new one does not start: without
writing there are no locks between processes, and an interrupted deletion cannot be finished. It
exits with code 2 and one sentence: free some space, or set `KEEPWARM_STORE` to another directory.
The store is unchanged.

An import is all or nothing: its records become findable after the last one is verified. If the
client disconnects, the disk fills up or the write budget runs out, nothing is left behind; after a
kill the next start deletes what was staged ([tests](../../tests/hostile/test_transfers.py)). A kill in
the few milliseconds in which verified records are renamed may leave some without an agent; they
are evicted like any unused block.

## Power cuts

A block, agent, pin or deletion that was acknowledged survives a power cut
([tests](../../tests/store/disk/test_power_loss.py)), provided that the disk honours a sync. The test
records the system calls of a real store, SQLite's included, builds every state that a disk may hold
after a cut (unsynced writes missing, partly there in pieces of 4096 bytes, or complete; renames
atomic), and opens each. Removing any one sync makes it fail.

| what | Linux | macOS |
|---|---|---|
| records and agents in the background | `fsync` of file and directory | a barrier (`F_BARRIERFSYNC`): order is kept, the last seconds may be lost |
| a `durable` answer, `Store.flush`, closing | the same | one full flush (`F_FULLFSYNC`) at the end |
| a deleted agent | the same | one full flush at the end |
| deletions and pins in the index | `synchronous = FULL` | the same with `fullfsync` |
| other index changes | at checkpoints; lost ones are found again from the files | the same with `checkpoint_fullfsync` |

`machine.json`, `history.json` and a store's `state.json` are replaced atomically
but not synced; a lost one is rebuilt. On macOS only the sequence of calls is tested.

## Other processes

Several processes may use one store. One that is stopped (`SIGSTOP`, a debugger, a frozen container)
while it holds a lock costs the others no answer
([tests](../../tests/hostile/test_stopped_process.py)):

| who | waits for a stopped process |
|---|---|
| a request | not at all: lookups use their own connection. A bad record is a miss at once and is quarantined before the next save. If the other process stopped while opening or closing the index, a lookup waits 0.1 s and is a miss |
| the writer thread | 5 s once, then not until the lock is free; saves are skipped and counted as failed, and a later request with the same prompt saves its blocks |
| a `durable` request | as long as the writer thread; its receipt then has `durable: false` |
| a deletion, a pin, another process starting | 5 s, then it fails with one sentence |

## The clock

The system clock may jump ([tests](../../tests/hostile/test_clock.py)). Waits, rates and limits use the
monotonic clock. What must outlast a process uses the system clock:

| what | the clock was ahead and is corrected | the clock jumps ahead |
|---|---|---|
| eviction order | future uses count as now, from the next eviction or start | new blocks displace old ones |
| pins with a TTL | keep the time they had left | end early |
| retention of agents | begins at the correction | a server deletes an agent only if it is still expired ten minutes later; `keepwarm cache gc` deletes it at once |
| write budget, history | future days and minutes are dropped | a new day begins |
| unfinished files | locked while written, so never taken for leftovers | the same |
"""  # noqa: E501


def page() -> str:
    rows = (f"| {fault.name} | {' | '.join(map(outcome, fault[2:]))} |\n" for fault in FAULTS)
    return INTRO + "".join(rows) + OUTRO


def outcome(cell: Cell | None) -> str:
    return cell.outcome if cell else "no files"


def test_the_page_is_current():
    assert PAGE.read_text() == page(), "run: python -m tests.hostile.test_fault_matrix"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
