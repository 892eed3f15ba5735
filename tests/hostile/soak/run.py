"""Workers that ask and attack, and a hand that kills; everything is counted."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from benchmarks.fairness import Models

from tests.hostile.conversations.damage import damage_file
from tests.hostile.soak.attacks import HEAVY, LIGHT, Target, attack
from tests.hostile.soak.servers import KEYS, YEAR_S, Measures, Place, Server, logged, sizes
from tests.hostile.soak.talks import (
    CHAT,
    MESSAGES,
    RESPONSES,
    WAIT_S,
    Prompt,
    body_for,
    chat_body,
    learn,
    receipt_in,
    streamed_text,
    text_of,
)
from tests.hostile.test_forged_bundles import edited, poisoned

WORKERS = 16
POLICIES = ("read-write", "read-write", "durable", "read-only", "ephemeral", "no-store")
ATTACKED = 0.3  # of all requests
HEAVY_SHARE = 0.02  # of the attacks
KEPT = 12  # agents of each store whose blocks must outlive every kill
KEPT_SHARE = 0.05  # of the requests
SAMPLE_S = 1.0
SERIES_S = 60.0
DAMAGED = 3  # files at once
LEAST_BLOCK = 4096  # bytes; smaller files of a shared tier are notes
CUT_OFF = (httpx.TransportError, OSError, EOFError, ValueError)  # the last: a stream's early end


@dataclass
class Report:
    """What has happened, by name."""

    answers: Counter[str] = field(default_factory=Counter)
    attacks: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    kept: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    reused: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    measures: dict[str, Measures] = field(default_factory=dict)
    series: list[dict[str, Any]] = field(default_factory=list)  # every minute

    def as_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "measures"}
        counted = json.loads(json.dumps(fields, sort_keys=True))
        return counted | {"measures": {name: vars(each) for name, each in self.measures.items()}}


class Soak:
    """One run on two stores, one of them encrypted and one shared by two servers.

    A run of hours damages files too; its stores have a tier in common in place of the encryption,
    and are those of the run before in this folder.
    """

    def __init__(
        self,
        folder: Path,
        models: Models,
        n_talks: int,
        seed: int,
        hours: float = 0.0,
        keep: Callable[[Report], object] = lambda _: None,
    ) -> None:
        """`keep` is given what is known after every minute of a run of hours, which may be cut."""
        self._shared = folder / "shared" if hours else None
        plain = Place("plain", folder / "plain", shared=self._shared)
        other = Place("sealed", folder / "sealed", encryption_key="a passphrase for the soak")
        if hours:
            other = Place("apart", folder / "apart", shared=self._shared)
        self.servers = [
            Server(models, place, number)
            for number, place in enumerate((plain, plain, other), start=1)
        ]
        self.places = [plain, other]
        self.report = Report()
        self._keep_report = keep
        self._notes = folder / "kept.json"
        self._duration_s = 3600 * hours
        self._began = 0.0
        self._reference = Server(models, Place("reference", folder / "reference"), 0)
        self._n_talks = n_talks
        self._chance = random.Random(seed)
        self._kept: dict[str, set[int]] = {place.name: set() for place in self.places}
        self._prompts: list[Prompt] = []
        self._bundles = (b"", b"")
        self._n_requests = self._n_sent = 0

    def run(self, n_requests: int, n_kills: int) -> Report:
        """So many requests, or as many as the hours have room for."""
        self._n_requests = n_requests
        if self._shared is not None:
            self._shared.mkdir(exist_ok=True)
        try:
            self._learn()
            self._start(self.servers)
            self._find_earlier()
            asyncio.run(self._run(n_kills))
            self._end()
        finally:
            for server in (*self.servers, self._reference):
                server.kill()
        return self.report

    @staticmethod
    def _start(servers: Sequence[Server]) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.start, servers))

    def _learn(self) -> None:
        self._reference.start()
        self._prompts = learn(self._reference.url, KEYS[0], self._n_talks)
        headers = {"Authorization": f"Bearer {KEYS[0]}", "X-Keepwarm-Cache": "durable"}
        body = chat_body(self._prompts[1].messages)
        with httpx.Client(base_url=self._reference.url, headers=headers, timeout=WAIT_S) as client:
            named = {"X-Keepwarm-Agent": "author"}
            client.post(CHAT, json=body, headers=named).raise_for_status()
            bundle = client.get("/v1/agents/author/export").raise_for_status().content
        self._bundles = (bundle, edited(bundle, poisoned))
        self._reference.stop()

    def _find_earlier(self) -> None:
        """What the run before has promised."""
        if self._duration_s and self._notes.is_file():
            known = json.loads(self._notes.read_text())
            self._kept = {name: set(numbers) for name, numbers in known.items()}
            for server in self.servers[1:]:
                asyncio.run(self._find(server))

    @property
    def _done(self) -> float:
        """The share of the run that is over."""
        if self._duration_s:
            return (time.monotonic() - self._began) / self._duration_s
        return self._n_sent / self._n_requests

    async def _run(self, n_kills: int) -> None:
        self._began = time.monotonic()
        sampler = asyncio.create_task(self._sample())
        workers = [asyncio.create_task(self._work(n)) for n in range(WORKERS)]
        await self._disturb(n_kills)
        await asyncio.gather(*workers)
        sampler.cancel()

    # requests

    async def _work(self, number: int) -> None:
        chance = random.Random(f"{number} {self._chance.random()}")
        limits = httpx.Limits(keepalive_expiry=1.0)  # sooner than the server's
        async with httpx.AsyncClient(timeout=WAIT_S, limits=limits) as client:
            while self._done < 1:
                self._n_sent += 1
                server = chance.choice([each for each in self.servers if each.url])
                with self._cut_off(server):
                    await self._one(client, server, chance)

    @contextmanager
    def _cut_off(self, server: Server) -> Iterator[None]:
        """Requests to a server that is killed meanwhile are no errors."""
        ends = server.ends
        try:
            yield
        except CUT_OFF as error:
            if server.ends == ends:
                self.report.unexpected[f"{type(error).__name__}: {error}"[:200]] += 1
            self.report.answers["cut off"] += 1

    async def _one(self, client: httpx.AsyncClient, server: Server, chance: random.Random) -> None:
        if chance.random() < ATTACKED:
            names = HEAVY if chance.random() < HEAVY_SHARE else LIGHT
            await self._attack(client, server, chance, chance.choice(names).__name__)
        elif chance.random() < KEPT_SHARE:
            await self._keep(client, server, chance.randrange(min(KEPT, self._n_talks)))
        else:
            await self._ask(client, server, chance)

    async def _attack(
        self, client: httpx.AsyncClient, server: Server, chance: random.Random, name: str
    ) -> None:
        target = Target(server.url, client, chance, *self._bundles)
        try:
            outcome = await attack(target, name)
        except TimeoutError:
            outcome = "no answer"
        self.report.attacks[name][str(outcome)] += 1
        if outcome in (500, 502, "accepted", "no answer"):
            self.report.unexpected[f"{name}: {outcome}"] += 1

    async def _ask(self, client: httpx.AsyncClient, server: Server, chance: random.Random) -> None:
        prompt, path = chance.choice(self._prompts), chance.choice((CHAT, MESSAGES, RESPONSES))
        streams, key = chance.random() < 0.4, chance.choice(KEYS)
        headers = {"Authorization": f"Bearer {key}", "X-Keepwarm-Cache": chance.choice(POLICIES)}
        body = {**body_for(path, prompt.messages), "stream": streams}
        if streams:
            async with client.stream("POST", server.url + path, json=body, headers=headers) as got:
                lines = [line async for line in got.aiter_lines()]
            if got.status_code == 200:
                self._judge(prompt, streamed_text(path, lines), receipt_in(lines))
                return
        else:
            got = await client.post(server.url + path, json=body, headers=headers)
            if got.status_code == 200:
                self._judge(prompt, text_of(path, got.json()), got.json()["keepwarm"])
                return
        self._refused(got.status_code)

    def _refused(self, status: int) -> None:
        self.report.answers[f"refused {status}"] += 1
        if status not in (429, 503, 504):
            self.report.unexpected[f"status {status}"] += 1

    def _judge(self, prompt: Prompt, text: str, receipt: dict[str, Any]) -> None:
        verdict = prompt.judge(text, receipt["spliced"])
        self.report.answers[verdict] += 1
        for tier, n_tokens in receipt["reused"].items():
            self.report.reused[tier] += n_tokens
        self.report.reused["computed"] += receipt["recomputed"]
        if verdict == "wrong":
            self.report.unexpected[f"wrong answer to {prompt.name}: {receipt}"[:300]] += 1

    # blocks that must stay

    async def _keep(self, client: httpx.AsyncClient, server: Server, number: int) -> None:
        """A durable turn of a pinned agent: from now on its blocks are found, whatever happens."""
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        named = {"X-Keepwarm-Cache": "durable", "X-Keepwarm-Agent": f"kept-{number}"}
        prompt = self._prompts[number]
        body = chat_body(prompt.messages)
        got = await client.post(server.url + CHAT, json=body, headers={**headers, **named})
        if got.status_code != 200:
            self._refused(got.status_code)
            return
        self._judge(prompt, text_of(CHAT, got.json()), got.json()["keepwarm"])
        if not got.json()["keepwarm"].get("durable"):
            self.report.kept["not acknowledged"] += 1
            return
        path = f"{server.url}/v1/agents/kept-{number}"
        pinned = await client.patch(path, json={"pinned": True}, headers=headers)
        if pinned.status_code == 200:
            self._kept[server.place.name].add(number)
            self.report.kept["acknowledged"] += 1

    async def _find(self, server: Server) -> None:
        """Look for everything that was acknowledged."""
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        async with httpx.AsyncClient(
            base_url=server.url, timeout=WAIT_S, headers=headers
        ) as client:
            for number in sorted(self._kept[server.place.name]):
                self.report.kept[await self._found(client, self._prompts[number])] += 1

    async def _found(self, client: httpx.AsyncClient, prompt: Prompt) -> str:
        body = chat_body(prompt.messages)
        found = (await client.post("/v1/cache/lookup", json=body)).raise_for_status().json()
        if sum(found["warm"].values()) >= found["prompt_tokens"] - 1:
            return "found"
        asked = {**body, "keepwarm": {"explain": True}}
        got = await client.post(CHAT, json=asked, headers={"X-Keepwarm-Cache": "read-only"})
        miss = got.raise_for_status().json()["keepwarm"].get("miss") or {}
        if miss.get("reason") == "not worth loading":
            return "found, not worth loading"
        self.report.unexpected[f"lost blocks of {prompt.name}: {found} {miss}"[:300]] += 1
        return "lost"

    # what happens to the servers

    async def _disturb(self, n_kills: int) -> None:
        moments = sorted(self._chance.uniform(0.05, 0.95) for _ in range(2 * n_kills))
        for number, moment in enumerate(moments):
            while self._done < moment:
                await asyncio.sleep(0.05)
            if self._duration_s and self._done >= 1:  # starts take long on a busy machine
                return
            if number % 2:
                await self._pause()
                self._damage()
            else:
                await self._kill(ahead_s=YEAR_S if number % 8 == 6 else 0.0)

    async def _kill(self, ahead_s: float) -> None:
        server = self._chance.choice(self.servers)
        await asyncio.sleep(self._chance.random() / 2)
        died, server.url = server.died, ""
        server.kill()
        self.report.events[f"kills, {server.place.name}"] += 1
        if died:
            self.report.unexpected["a server ended by itself"] += 1
        await asyncio.to_thread(server.start, ahead_s)
        self.report.events["starts with the clock ahead"] += bool(ahead_s)
        with self._cut_off(server):
            await self._find(server)

    async def _pause(self) -> None:
        server = self._chance.choice(self.servers)
        self.report.events["pauses"] += 1
        await asyncio.to_thread(server.pause, 0.2 + self._chance.random())

    def _damage(self) -> None:
        """Files of blocks that nobody was promised, once all that will be promised is on disk."""
        n_kept = min(KEPT, self._n_talks)
        if self._shared is None or any(len(kept) < n_kept for kept in self._kept.values()):
            return
        files = [path for place in self.places for path in place.damageable()]
        files += [path for path, n_bytes in sizes(self._shared) if n_bytes > LEAST_BLOCK]
        for path in self._chance.sample(files, min(DAMAGED, len(files))):
            with suppress(FileNotFoundError):  # evicted meanwhile
                self.report.events[damage_file(self._chance, path)] += 1

    async def _sample(self) -> None:
        with suppress(asyncio.CancelledError):
            while True:
                n_before = len(self.report.series)
                await asyncio.to_thread(self._measure)
                if len(self.report.series) > n_before:
                    self._note()
                await asyncio.sleep(SAMPLE_S)

    def _measure(self) -> None:
        seen = {f"server {server.number}": server.measure() for server in self.servers}
        for place in self.places:
            used = Measures(store_bytes=place.n_bytes(), home_bytes=place.n_bytes(place.home))
            seen[place.name] = used
        if self._shared is not None:
            n_bytes = sum(size for _, size in sizes(self._shared))
            seen["shared"] = Measures(store_bytes=n_bytes)
        for name, measures in seen.items():
            self.report.measures.setdefault(name, Measures()).add(measures)
        seconds = time.monotonic() - self._began
        if self._duration_s and seconds >= SERIES_S * len(self.report.series):
            found = {name: _known(measures) for name, measures in seen.items()}
            self.report.series.append({"s": round(seconds), "n_sent": self._n_sent, **found})

    def _end(self) -> None:
        """Stop and start once more: everything is found, nothing is left."""
        for server in self.servers:
            if (code := server.stop()) != 0:
                self.report.unexpected[f"exit code {code}"] += 1
        self._start(self.servers[1:])  # one at each store
        for server in self.servers[1:]:
            asyncio.run(self._find(server))
            server.stop()
        for place in self.places:
            for name in place.leftovers():
                self.report.unexpected[f"left in {place.name}: {name}"[:200]] += 1
        self.report.events.update(logged(self.servers))
        self.report.events["requests"] = self._n_sent
        if self._duration_s:
            self._note()

    def _note(self) -> None:
        """What was promised, for the next run in this folder, and what has happened so far."""
        kept = {name: sorted(numbers) for name, numbers in self._kept.items()}
        self._notes.write_text(json.dumps(kept))
        self.report.events["requests"] = self._n_sent
        self._keep_report(self.report)


def _known(measures: Measures) -> dict[str, int]:
    return {name: value for name, value in vars(measures).items() if value}
