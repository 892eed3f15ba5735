"""Mutants of every kind of file that a stranger may hand over, read as a user's would be.

    python -m tests.kit.mutants.fuzz --count 100000 [bundle gguf weights record prompt-cache]

A child process reads them, so that a crash in native code is seen; one that dies or hangs is
reported with the number of its mutant. Only our own errors may come out, in one short sentence,
within bounds of memory and processor time.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from keepwarm.errors import KeepwarmError
from tests.kit.mutants import bundles as bundle_mutants
from tests.kit.mutants import ggufs as gguf_mutants
from tests.kit.mutants import safetensors as safetensors_mutants
from tests.kit.mutants.changes import Mutate

MAX_CPU_S = 5.0  # for one mutant; a file of 42 kB once took 18
MAX_NEW_BYTES = 1 << 30  # of address space, beyond what the samples need
MAX_GROWTH = 256 << 20  # of memory in use, over all mutants of a batch
BATCH = 10_000
MAX_SENTENCE = 1000  # characters
HANGS_AFTER_S = 300.0  # without a new mutant: guards against hanging, not against slowness
ROOT = Path(__file__).parents[3]


class Target(NamedTuple):
    """Samples of a format, how they are changed, and who reads them."""

    samples: list[bytes]
    mutate: Mutate
    read: Callable[[bytes, bytes], None]  # a mutant, and the sample it was made from

    def mutant(self, number: int) -> tuple[bytes, bytes]:
        chance = Random(number)
        sample = chance.choice(self.samples)
        return self.mutate(chance, sample), sample


@dataclass
class Summary:
    format: str
    first: int
    count: int
    seconds: float = 0.0
    accepted: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    growth_bytes: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Summary) -> None:
        self.seconds = round(self.seconds + other.seconds, 1)
        self.accepted += other.accepted
        for kind, n in other.errors.items():
            self.errors[kind] = self.errors.get(kind, 0) + n
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.growth_bytes = max(self.growth_bytes, other.growth_bytes)
        self.failures += other.failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        summaries = _read_all(given.formats, given.first, given.count, given.child)
    else:
        summaries = (fuzz_in_batches(name, given.first, given.count) for name in given.formats)
    failed = False
    for summary in summaries:
        print(json.dumps(asdict(summary)), flush=True)  # noqa: T201
        failed |= bool(summary.failures)
    sys.exit(failed and not given.child)


def fuzz_in_batches(name: str, first: int, count: int) -> Summary:
    """Many mutants of one format, a new child for every batch: what one leaves behind is bounded
    for each batch alone.
    """
    total = Summary(name, first, count)
    for start in range(first, first + count, BATCH):
        n_mutants = min(BATCH, first + count - start)
        for summary in fuzz([name], start, n_mutants):
            total.add(summary)
        if total.failures:
            break
    return total


def fuzz(formats: list[str], first: int, count: int) -> list[Summary]:
    """Read so many mutants of each format in a child process."""
    with tempfile.TemporaryDirectory(dir=_fast_directory()) as name:
        work = Path(name)
        (work / "at").write_bytes(bytes(64))
        command = [sys.executable, "-m", "tests.kit.mutants.fuzz", *formats, "--child", str(work)]
        command += ["--first", str(first), "--count", str(count)]
        with (work / "out").open("wb") as out, (work / "err").open("wb") as err:
            child = subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT)
            why = _watch(child, work / "at")
        lines = (work / "out").read_text().splitlines()
        found = [Summary(**json.loads(line)) for line in lines]
        if why:
            where = (work / "at").read_bytes().rstrip(b"\0").decode()
            said = (work / "err").read_text(errors="replace")[-2000:]
            died = Summary(where.partition(" ")[0], first, count)
            died.failures.append(f"mutant {where}: {why}\n{said}")
            found.append(died)
        return found


def _fast_directory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: PTH112


def _watch(child: subprocess.Popen[bytes], at: Path) -> str | None:
    """Wait for the child's end; the reason if it died or hung."""
    seen, since = b"", time.monotonic()
    while child.poll() is None:
        time.sleep(0.2)
        if (now := at.read_bytes()) != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > HANGS_AFTER_S:
            child.kill()
            child.wait()
            return f"nothing for {HANGS_AFTER_S:.0f} s"
    return f"the process ended with {child.returncode}" if child.returncode else None


# In the child


def _read_all(formats: list[str], first: int, count: int, work: Path) -> Iterator[Summary]:
    with (work / "at").open("r+b") as file, mmap.mmap(file.fileno(), 64) as at:
        for name in formats:
            at[:] = f"{name} samples".encode().ljust(64, b"\0")
            directory = work / name
            directory.mkdir()
            target = CONTROLS[name] if name in CONTROLS else FORMATS[name](directory)
            yield _read_mutants(name, target, first, count, at)


def _read_mutants(name: str, target: Target, first: int, count: int, at: mmap.mmap) -> Summary:
    summary, begun = Summary(name, first, count), time.monotonic()
    for sample in target.samples:
        target.read(sample, sample)  # must be accepted
    before = _peak_bytes()
    with _address_space(MAX_NEW_BYTES):
        for number in range(first, first + count):
            at[:] = f"{name} {number}".encode().ljust(64, b"\0")
            mutant, sample = target.mutant(number)
            clock = time.process_time()
            if why := _fault(partial(target.read, mutant, sample), summary):
                summary.failures.append(f"{name} {number}: {why}"[:2000])
            took = time.process_time() - clock
            summary.slowest_s = max(summary.slowest_s, took)
            if took > MAX_CPU_S:
                summary.failures.append(f"{name} {number}: took {took:.1f} s")
            if len(summary.failures) >= 20:
                break
    summary.seconds = round(time.monotonic() - begun, 1)
    summary.growth_bytes = _peak_bytes() - before
    if summary.growth_bytes > MAX_GROWTH:
        summary.failures.append(f"{name}: memory grew by {summary.growth_bytes} bytes")
    return summary


def _fault(read: Callable[[], None], summary: Summary) -> str | None:
    try:
        read()
    except KeepwarmError as error:
        summary.errors[type(error).__name__] = summary.errors.get(type(error).__name__, 0) + 1
        return _unlike_ours(error)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    summary.accepted += 1
    return None


def _unlike_ours(error: KeepwarmError) -> str | None:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return f"memory ran out: {error}"
        cause = cause.__cause__
    text = str(error)
    if len(text) > MAX_SENTENCE or "\n" in text:
        return f"a sentence of {len(text)} characters: {text[:300]!r}"
    return None


def _peak_bytes() -> int:
    """The most memory that was in use; Linux counts that of the parent into `ru_maxrss`."""
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def _address_space(n_bytes: int) -> Iterator[None]:
    """Let the process map only so much more memory, where the system enforces that."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + n_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def bundles(work: Path) -> Target:
    from keepwarm.agents.agent_store import AgentStore
    from keepwarm.agents.bundle import manifest_in
    from keepwarm.prefix.blocks import chain
    from keepwarm.records.record import Part
    from tests.agents.test_agents import IDENTITY, LIMITS, turn
    from tests.store.kit import record, tokens_of

    def exported(disk_store: AgentStore, name: str, n_tokens: int) -> bytes:
        turn(disk_store, name, tokens_of(n_tokens))
        disk_store.export_agent(name, work / name)
        return (work / name).read_bytes()

    with AgentStore(work / "home", LIMITS) as home:
        namespace = home.register(IDENTITY)
        samples = [exported(home, "one", 200), exported(home, "more", 700)]
        for ref in chain(namespace, tokens_of(700)):
            home.disk.put(record(ref, Part.STATE, namespace=namespace))
            home.disk.put(record(ref, Part.WINDOW, namespace=namespace))
        samples.append(exported(home, "states", 700))
    samples += [path.read_bytes() for path in (ROOT / "tests/data/golden/stores").glob("*.bundle")]
    path, identities = work / "bundle", {}
    for sample in samples:
        path.write_bytes(sample)
        identities[sample] = manifest_in(path).identity
    store = AgentStore(work / "store", LIMITS)

    def read(mutant: bytes, sample: bytes) -> None:
        path.write_bytes(mutant)
        made = store.import_agent(path, identities[sample], "imported")
        store.agents.delete(made.id)

    return Target(samples, bundle_mutants.bundle, read)


def ggufs(work: Path) -> Target:
    from keepwarm.models.load import read_model
    from tests.kit.checkpoints import make_config, make_tokenizer, make_weights
    from tests.kit.gguf_models import Written
    from tests.kit.gguf_writer import encode_weights, metadata_for, write_gguf

    shape = make_config(make_tokenizer())
    path, samples = work / "model.gguf", []
    for kind in ("F32", "F16", "Q4_0", "Q4_1", "Q8_0"):
        tensors, _ = encode_weights(shape, make_weights(shape), kind)
        samples.append(write_gguf(path, metadata_for(shape), tensors).read_bytes())
    for name, recipe, factor in (("llama", "Q4_K_M", 8.0), ("qwen2", "Q5_K_M", None)):
        samples.append(Written(work, name, recipe, factor=factor).path.read_bytes())

    def read(mutant: bytes, _: bytes) -> None:
        path.write_bytes(mutant)
        read_model("fuzzed", path)

    return Target(samples, gguf_mutants.gguf, read)


def weights(work: Path) -> Target:
    from keepwarm.models.load import read_model
    from tests.kit.checkpoints import write_checkpoint

    directory = write_checkpoint(work / "model")
    path = directory / "model.safetensors"

    def read(mutant: bytes, _: bytes) -> None:
        path.write_bytes(mutant)
        read_model("fuzzed", directory)

    return Target([path.read_bytes()], safetensors_mutants.safetensors, read)


def records(work: Path) -> Target:
    from io import BytesIO

    from keepwarm.records.record import check_identity, encode_record, open_record, read_tensors
    from tests.store.kit import record, refs_of

    def read(mutant: bytes, _: bytes) -> None:
        file = BytesIO(mutant)
        opened = open_record(file, len(mutant))
        check_identity(opened.header, opened.header.key, opened.header.part)
        read_tensors(file, opened)

    made = [b"".join(encode_record(record(ref))) for ref in refs_of(3, n_last=100)]
    golden = (ROOT / "tests/data/golden/stores").glob("*-plain/blocks/*/*.safetensors")
    return Target(
        [*made, *(path.read_bytes() for path in golden)], safetensors_mutants.record, read
    )


def prompt_caches(work: Path) -> Target:
    from keepwarm.kv.files.prompt_cache import import_prompt_cache

    path = work / "cache.safetensors"
    samples = []
    for file in sorted((ROOT / "tests/data/prompt-cache").glob("*.safetensors")):
        try:
            import_prompt_cache(file)
        except KeepwarmError:
            continue  # a file that its version damaged
        samples.append(file.read_bytes())

    def read(mutant: bytes, _: bytes) -> None:
        path.write_bytes(mutant)
        import_prompt_cache(path)

    return Target(samples, safetensors_mutants.safetensors, read)


FORMATS: dict[str, Callable[[Path], Target]] = {
    "bundle": bundles,
    "gguf": ggufs,
    "weights": weights,
    "record": records,
    "prompt-cache": prompt_caches,
}


def _control(fault: Callable[[], None]) -> Target:
    """A reader with a fault, which must be reported."""

    def read(mutant: bytes, sample: bytes) -> None:
        if mutant != sample:
            fault()

    return Target([b"sample"], lambda chance, data: data + chance.randbytes(1), read)


def _raise(error: Exception) -> None:
    raise error


CONTROLS = {
    "raises": _control(lambda: _raise(ValueError("not ours"))),
    "takes memory": _control(lambda: _raise(KeepwarmError()) if bytearray(2 << 30) else None),
    "keeps memory": _control(lambda: KEPT.append(b"x" * MAX_GROWTH)),
    "dies": _control(os.abort),
}
KEPT: list[bytes] = []

if __name__ == "__main__":
    main()
