"""Whether blocks that leave a device beside other work hold the bytes that the device computed.

`python -m benchmarks.captures --blocks 1000` on a CUDA machine. Prompts are prefilled, cancelled,
repeated and answered beside running answers, with so little memory for blocks that most are
evicted, and slabs are reused all the time. Of every captured block the same rows are copied on the
device and read the ordinary way. Some time later, when the caches have changed and slabs have been
given back and taken, the two are compared; then the blocks are restored and compared again.
`--shape tiny` and `--shape tiny-windows` run on any device, through the same code.
"""

from __future__ import annotations

import argparse
import json
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import xxhash

from benchmarks.shapes import SHAPES, build, make_tokenizer
from keepwarm import config, kv
from keepwarm.cache.restore import restorer as capturing
from keepwarm.cache.restore.loading import Reader
from keepwarm.cache.restore.restorer import Restorer
from keepwarm.cache.store import Budgets, Store
from keepwarm.device import kernels
from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.errors import Cancelled
from keepwarm.kv.buffers import to_buffer
from keepwarm.kv.slabs import SlabPool
from keepwarm.kv.slices import Block, Rows, cut_blocks, offload_blocks
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.prefix.policy import Policy
from keepwarm.store.tiers import Tiers
from keepwarm.text.request import Progress, Request, Sampling

RUNNING = 3  # answers that are decoded all the time
MAX_DELAY_S = 2.0  # between the capture of a block and its comparison
MEMORY_BLOCKS = 60  # kept in memory; a prompt has up to 20


@dataclass
class Findings:
    """What was compared; all of `different` must be 0."""

    blocks: int = 0
    tensors: int = 0
    n_bytes: int = 0
    different: int = 0
    restored_blocks: int = 0
    restored_different: int = 0
    requests: int = 0
    cancelled: int = 0
    evicted: int = 0

    @property
    def holds(self) -> bool:
        return not self.different and not self.restored_different


class _Pair(NamedTuple):
    """A captured block, the same rows in arrays of their own, and when to compare them."""

    captured: Block
    ordinary: Block
    due: float


class Comparison:
    """Captures as the engine does, and compares on a thread of its own."""

    def __init__(self, corrupt: Callable[[Block], object] = lambda _: None) -> None:
        """`corrupt` changes captured bytes: a control that must be found."""
        self.findings = Findings()
        self._corrupt = corrupt
        self._dice = np.random.default_rng(0)
        self._pairs: queue.Queue[_Pair | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def offload(
        self, pool: SlabPool, caches: kv.Caches, n_tokens: int, numbers: range, with_state: bool
    ) -> Iterator[Block]:
        """In place of `offload_blocks`. Nothing waits for the copies into slabs."""
        ordinary = dict(_ordinary(caches, n_tokens, numbers))
        for block in offload_blocks(pool, caches, n_tokens, numbers, with_state):
            due = time.monotonic() + self._dice.uniform(0, MAX_DELAY_S)
            self._pairs.put(_Pair(block, ordinary[block.index], due))
            yield block

    def finish(self) -> Findings:
        self._pairs.put(None)
        self._thread.join()
        return self.findings

    def _run(self) -> None:
        while (pair := self._pairs.get()) is not None:
            time.sleep(max(0.0, pair.due - time.monotonic()))
            self._corrupt(pair.captured)
            self._compare(pair)

    def _compare(self, pair: _Pair) -> None:
        found, wanted = _tensors(pair.captured), _tensors(pair.ordinary)
        self.findings.blocks += 1
        self.findings.different += found.keys() != wanted.keys()
        for name in found.keys() & wanted.keys():
            data = to_buffer(found[name]).data
            self.findings.tensors += 1
            self.findings.n_bytes += data.nbytes
            self.findings.different += data != to_buffer(wanted[name]).data


def _ordinary(caches: kv.Caches, n_tokens: int, numbers: range) -> Iterator[tuple[int, Block]]:
    for block in cut_blocks(caches, n_tokens, first_block=numbers.start):
        if block.index in numbers:
            yield block.index, block


def _tensors(block: Block) -> dict[str, Rows]:
    """Rows only: states are captured with some blocks."""
    return {**block.delta, **block.window}


class Traffic:
    """Requests of one engine, at most four prompts at a time."""

    def __init__(self, engine: Engine, unit: int, findings: Findings) -> None:
        self._engine = engine
        self._unit = unit
        self._findings = findings
        self._dice = np.random.default_rng(1)
        self.prompts: list[list[int]] = []

    def _ask(self, prompt: Sequence[int], n: int, policy: Policy = Policy.READ_WRITE) -> Answer:
        sampling = Sampling(max_tokens=n, temperature=0)
        return self._engine.submit(Request(prompt=list(prompt), sampling=sampling, policy=policy))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Answers that go on all the time; their own blocks are kept too."""
        is_over = threading.Event()

        def talk(number: int) -> None:
            for turn in count():
                answer = self._ask([number, turn % 250, *range(60)], 4 * BLOCK_TOKENS)
                for _ in _events(answer):
                    if is_over.is_set():
                        answer.cancel()
                if is_over.is_set():
                    return

        threads = [threading.Thread(target=talk, args=(n,), daemon=True) for n in range(RUNNING)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()

    def send_some(self) -> None:
        """Two new prompts, one that is cancelled half-way, and an earlier one again."""
        new = [self._prompt() for _ in range(3)]
        answers = [self._ask(prompt, 8) for prompt in new]
        if self.prompts:
            self._engine.call(self._engine.live.clear).result()
            earlier = self.prompts[int(self._dice.integers(len(self.prompts)))]
            answers.append(self._ask([*earlier, 7], 8))
        for event in _events(answers[2]):
            if isinstance(event, Progress) and event.done >= len(new[2]) // 3:
                answers[2].cancel()
                self._findings.cancelled += 1
                break
        for answer in answers:
            list(_events(answer))
        self.prompts += new[:2]
        self._findings.requests += len(answers)

    def _prompt(self) -> list[int]:
        n_tokens = int(self._dice.integers(self._unit // 2, self._unit))
        return [int(token) for token in self._dice.integers(0, 250, n_tokens)]


def _events(answer: Answer) -> Iterator[Any]:
    try:
        yield from answer
    except Cancelled:
        return


def check_restores(engine: Engine, prompts: Sequence[Sequence[int]], findings: Findings) -> None:
    """Restore each prompt, from memory or disk, and compare its rows with those of a restore that
    reads the files without a slab."""
    restorer = engine.lane_of().restorer
    tiers = Tiers([named for named in restorer.tiers.named if named[0] == "disk"])
    plain = replace(restorer, tiers=tiers, reader=Reader(tiers))
    for prompt in prompts:
        found, wanted = (
            engine.call(partial(_row_digests, one, prompt)).result() for one in (restorer, plain)
        )
        pairs = list(zip(found, wanted, strict=False))  # disk may have fewer: saves can be dropped
        findings.restored_blocks += len(pairs)
        findings.restored_different += sum(digest != other for digest, other in pairs)
    plain.reader.close()


def _row_digests(restorer: Restorer, prompt: Sequence[int]) -> list[str]:
    restored = restorer.restore([*prompt, 7])
    if restored.caches is None:
        return []
    whole = range(restored.n_tokens // BLOCK_TOKENS)
    return [_digest(block) for _, block in _ordinary(restored.caches, restored.n_tokens, whole)]


def _digest(block: Block) -> str:
    hasher = xxhash.xxh3_128()
    for name, rows in sorted(_tensors(block).items()):
        hasher.update(name.encode())
        hasher.update(to_buffer(rows).data)
    return hasher.hexdigest()


def measure(
    shape: str,
    unit: int,
    n_blocks: int,
    folder: Path,
    comparison: Comparison,
    *,
    home: Path | None = None,
) -> Findings:
    home = home or folder / "home"
    settings = config.load({"KEEPWARM_HOME": str(home)}, store=folder / "store")
    kernels.start(settings.home)
    spec = SHAPES[shape]
    token_bytes = 8 * spec["num_hidden_layers"] * spec["num_key_value_heads"] * spec["head_dim"]
    memory_bytes = MEMORY_BLOCKS * BLOCK_TOKENS * token_bytes
    budgets = Budgets(memory_bytes, min_free_disk_bytes=0)
    model = replace(build(shape, folder), tokenizer=make_tokenizer(shape, folder / "tokenizer"))
    findings = comparison.findings
    with (
        patch.object(SlabPool, "if_cuda", classmethod(lambda cls: cls())),  # on any device
        patch.object(capturing, "offload_blocks", comparison.offload),
        Store(budgets=budgets, settings=settings) as store,
        Engine(model, store) as engine,
    ):
        traffic = Traffic(engine, unit, findings)
        with traffic.running():
            while findings.blocks < n_blocks:
                traffic.send_some()
                print(f"{findings.blocks} blocks, {findings.different} different", flush=True)
        engine.wait_until_saved()
        comparison.finish()
        check_restores(engine, traffic.prompts[-12:], findings)
        findings.evicted = store.memory.stats().evicted
    return findings


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.captures", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where to write blocks")
    parser.add_argument("--home", type=Path, help="where kernels and rates are kept")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    unit = 2048 if given.shape.startswith("tiny") else 5120
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measure(
            given.shape, unit, given.blocks, Path(folder), Comparison(), home=given.home
        )
    said = {"shape": given.shape, "device": str(mx.default_device()), **asdict(found)}
    print(json.dumps(said | {"holds": found.holds}))
    if given.json:
        given.json.write_text(json.dumps(said | {"holds": found.holds}, indent=1))
    raise SystemExit(0 if found.holds else 1)


if __name__ == "__main__":
    main()
