"""One client: what it sends, and what it notes of the answers."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.ledger.answers import Json, objects_of, parse, receipt_of, shown, text_of, words
from benchmarks.ledger.book import Book, Sent
from benchmarks.ledger.model import WORDS, Tokens

CHAT, AGENTS = "/v1/chat/completions", "/v1/agents"
N_CONTEXT = 2048
TOO_LONG = "dog " * (N_CONTEXT * 3 // 4)  # in tokens; one of so many words is not tokenised
WAIT_S = 60.0


class Client:
    """Sends requests of all kinds; its conversations last through restarts of the server."""

    def __init__(self, book: Book, model: Path, number: int, key: str, secret: str) -> None:
        self._book, self._model, self._tokens = book, str(model), Tokens(model)
        self._name, self._key, self._secret = f"client{number}", key, secret
        self._random = random.Random(number)  # noqa: S311, it picks requests
        self._deck: list[str] = []
        self._n_sent = 0
        self._chat: list[dict[str, str]] = []
        self._agents: dict[str, list[dict[str, str]]] = {}
        self._response: tuple[str, list[dict[str, str]]] | None = None

    @contextmanager
    def connected(self, url: str) -> Iterator[None]:
        headers = {"authorization": f"Bearer {self._secret}"}
        self._address = urlsplit(url).netloc
        with httpx.Client(base_url=url, timeout=600, headers=headers) as self._http:
            yield

    def ask(self) -> None:
        """The next request: all kinds in turn, in an order of its own."""
        if not self._deck:
            self._deck = self._random.sample(list(KINDS), len(KINDS))
        kind = self._deck.pop()
        self._book.kinds.add(kind)
        KINDS[kind](self)

    # parts of requests

    def _text(self, n: int = 60) -> str:
        return " ".join(self._random.choices(WORDS, k=n))

    def _user(self, n: int = 60) -> dict[str, str]:
        return {"role": "user", "content": self._text(n)}

    def _new(self, api: str, path: str, prompts: Any, **known: Any) -> Sent:
        self._n_sent += 1
        request_id = f"{self._name}-{self._n_sent}"
        return Sent(request_id, self._key, api, path, prompts, **known)

    def _headers(self, sent: Sent, policy: str = "") -> dict[str, str]:
        agent = {"x-keepwarm-agent": sent.agent} if sent.agent and AGENTS not in sent.path else {}
        cache = {"x-keepwarm-cache": policy} if policy else {}
        return {"x-request-id": sent.id, **agent, **cache}

    # sending

    def _send(self, sent: Sent, body: Json, policy: str = "") -> list[Json]:
        """Send a request, read all of the answer, and compare what it shows."""
        self._book.know(sent.key, *sent.prompts)
        self._book.add(sent)
        began = time.perf_counter()
        headers = self._headers(sent, policy)
        with self._http.stream("POST", sent.path, json=body, headers=headers) as answer:
            objects = objects_of(answer)
        sent.seconds, sent.status = time.perf_counter() - began, answer.status_code
        self._book.call(sent.api, sent.status)
        if sent.status == 200:
            self._compare(sent, objects)
        elif sent.outcome != "refused":
            self._book.differ(f"{sent.id} {sent.path}", "an answer", objects)
        return objects

    def _compare(self, sent: Sent, objects: list[Json]) -> None:
        """The receipt and the API's own counts, with what was sent and read."""
        receipt, counts, where = receipt_of(objects), shown(objects), f"{sent.id} {sent.path}"
        sent.reused = {tier: n for tier, n in receipt["reused"].items() if n}
        n_reused, sent.n_answer = sum(sent.reused.values()), words(objects)
        pairs = {
            "prompt_tokens of the receipt": (sent.n_prompt, receipt["prompt_tokens"]),
            "recomputed": (sent.n_prompt - n_reused, receipt["recomputed"]),
            "answer": (sent.max_answer, sent.n_answer),
            "prompt tokens": (sent.n_prompt, counts.prompt),
            "cached tokens": (n_reused, counts.cached),
            "completion tokens": (sent.n_answer, counts.completion),
        }
        for name, (expected, got) in pairs.items():
            if got is not None and expected != got:
                self._book.differ(f"{where}: {name}", expected, got)

    def _manage(self, method: str, path: str, body: Json | None = None) -> Json:
        answer = self._http.request(method, path, json=body)
        self._book.call("agents" if path.startswith(AGENTS) else "dashboard", answer.status_code)
        found: Json = answer.raise_for_status().json()
        return found

    def _running(self, sent: Sent, states: Sequence[str] = ("decoding",)) -> int:
        """The number of a request, once it is in such a state."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for running in self._manage("GET", "/v1/dashboard/now")["running"]:
                if running["request_id"] == sent.id and running["state"] in states:
                    return int(running["number"])
        raise RuntimeError(f"{sent.id} was never running.")

    # kinds of requests

    def chat(self, policy: str = "", **more: Any) -> None:
        messages = [self._user()]
        sent = self._new("chat", CHAT, [self._tokens.of_chat(messages)], max_answer=4)
        sent.asks = policy != "no-store"
        self._send(sent, {"messages": messages, "max_tokens": 4, **more}, policy)

    def turn(self, *, stream: bool = False) -> None:
        """A further turn of a conversation, after some of them a new one."""
        if len(self._chat) > 10:
            self._chat = []
        is_later = bool(self._chat)
        self._chat.append(self._user())
        prompt = self._tokens.of_chat(self._chat)
        sent = self._new("chat", CHAT, [prompt], later=is_later, max_answer=6)
        options = {"stream": stream, "stream_options": {"include_usage": True} if stream else None}
        body = {"messages": self._chat, "max_tokens": 6, **options}
        answer = text_of(self._send(sent, body))
        self._chat.append({"role": "assistant", "content": answer})
        self._book.know(self._key, self._tokens.of_chat(self._chat))

    def again(self) -> None:
        """The same prompt twice."""
        messages = [self._user()]
        for _ in range(2):
            sent = self._new("chat", CHAT, [self._tokens.of_chat(messages)], max_answer=2)
            self._send(sent, {"messages": messages, "max_tokens": 2})

    def choices(self) -> None:
        text = self._text()
        sent = self._new("completions", "/v1/completions", [self._tokens.of_text(text)])
        sent.max_answer = 6
        self._send(sent, {"prompt": text, "n": 2, "max_tokens": 3})

    def prompts(self) -> None:
        """Several prompts of tokens in one request."""
        prompts = [self._tokens.of_text(self._text(n)) for n in (30, 40)]
        sent = self._new("completions", "/v1/completions", prompts, max_answer=6)
        self._send(sent, {"prompt": prompts, "max_tokens": 3})

    def response(self) -> None:
        """A response, or one that continues the last."""
        before, past = self._response or (None, [])
        messages = [*past, self._user()]
        prompt = self._tokens.of_chat(messages)
        sent = self._new("responses", "/v1/responses", [prompt], later=bool(past), max_answer=4)
        body = {"input": messages[-1]["content"], "max_output_tokens": 4}
        objects = self._send(sent, {**body, "previous_response_id": before})
        said = {"role": "assistant", "content": text_of(objects)}
        self._book.know(self._key, self._tokens.of_chat([*messages, said]))
        self._response = (objects[-1]["id"], [*messages, said]) if len(messages) < 8 else None

    def message(self, *, stream: bool = False) -> None:
        messages = [{"role": "system", "content": self._text(20)}, self._user()]
        sent = self._new("messages", "/v1/messages", [self._tokens.of_chat(messages)])
        sent.max_answer = 4
        body = {"system": messages[0]["content"], "messages": messages[1:], "max_tokens": 4}
        self._send(sent, {**body, "stream": stream, "model": self._model})

    def ollama(self, path: str = "/api/chat", *, stream: bool = True) -> None:
        user = self._user()
        sent = self._new("ollama", path, [self._tokens.of_chat([user])], max_answer=4)
        asked = {"messages": [user]} if path == "/api/chat" else {"prompt": user["content"]}
        options = {"num_predict": 4, "temperature": 0}
        self._send(sent, {"model": self._model, **asked, "stream": stream, "options": options})

    def embed(self, api: str = "embeddings", path: str = "/v1/embeddings") -> None:
        texts = [f"{word} {self._text(20)}" for word in self._random.sample(WORDS, 2)]
        prompts = [self._tokens.of_text(text) for text in texts]
        self._send(
            self._new(api, path, prompts, asks=False), {"input": texts, "model": self._model}
        )

    def warm(self) -> None:
        messages = [self._user()]
        sent = self._new("cache", "/v1/cache/warm", [self._tokens.of_chat(messages)], asks=False)
        self._send(sent, {"messages": messages})

    def agent(self) -> None:
        """A new agent, a further turn by its id, a fork, a turn of that; some are deleted."""
        name = f"{self._name}-agent{len(self._agents)}"
        self._agent_turn(name, CHAT, [])
        messages = self._agent_turn(name, f"{AGENTS}/{name}/chat/completions", self._agents[name])
        self._manage("POST", f"{AGENTS}/{name}/fork", {"id": f"{name}-fork"})
        turns = self._book.agents[self._key, name]
        self._book.agents[self._key, f"{name}-fork"] = list(turns)
        fork = f"{AGENTS}/{name}-fork/chat/completions"
        self._agent_turn(f"{name}-fork", fork, messages)
        if len(self._agents) % 3 == 0:
            self._manage("DELETE", f"{AGENTS}/{name}")
            del self._book.agents[self._key, name]

    def _agent_turn(self, name: str, path: str, past: list[dict[str, str]]) -> list[dict[str, str]]:
        """Only what is new is sent."""
        messages = [*past, self._user()]
        prompt = self._tokens.of_chat(messages)
        api = "agents" if path.startswith(AGENTS) else "chat"
        sent = self._new(api, path, [prompt], agent=name, later=bool(past), max_answer=5)
        objects = self._send(sent, {"messages": messages[-1:], "max_tokens": 5}, "durable")
        said = [*messages, {"role": "assistant", "content": text_of(objects)}]
        answer = self._tokens.of_text(text_of(objects))
        self._book.know(self._key, [*prompt, *answer])
        turns = self._book.agents.setdefault((self._key, name), [])
        turns.append(len(prompt) + len(answer))
        self._agents[name] = said
        return said

    def bounded(self) -> None:
        self.chat(keepwarm={"kv": {"max_kv_size": 512}})

    def refused(self) -> None:
        """By the API, by the model's context, by name, and for its key."""
        user, long = [self._user()], [{"role": "user", "content": TOO_LONG}]
        path = f"{AGENTS}/nobody/chat/completions"
        self._refuse("chat", CHAT, {"messages": "no list"})
        self._refuse(
            "messages", "/v1/messages", {"model": self._model, "max_tokens": 1, "messages": []}
        )
        self._refuse("agents", path, {"messages": user})
        self._refuse("chat", CHAT, {"messages": long}, [self._tokens.of_chat(long)])
        answer = self._http.post(CHAT, json={}, headers={"authorization": "Bearer wrong"})
        self._book.call("chat", answer.status_code)

    def _refuse(self, api: str, path: str, body: Json, prompts: Any = ()) -> None:
        self._send(self._new(api, path, prompts, outcome="refused"), body)

    def leave(self) -> None:
        """Read a word of a stream, and go away."""
        sent, body = self._long()
        with self._http.stream("POST", CHAT, json=body, headers=self._headers(sent)) as answer:
            self._note_start(sent, answer)
            for found in parse(answer.iter_lines()):
                sent.n_answer += words([found])
                if sent.n_answer:
                    break
        self._book.call("chat", 200)

    def cancel(self) -> None:
        """Have a stream ended by the dashboard."""
        sent, body = self._long()
        with self._http.stream("POST", CHAT, json=body, headers=self._headers(sent)) as answer:
            self._note_start(sent, answer)
            number = self._running(sent)
            self._manage("POST", f"/v1/dashboard/requests/{number}/cancel")
            sent.n_answer = words(found for found in parse(answer.iter_lines()))
        self._book.call("chat", 200)

    def hang_up(self) -> None:
        """Go away before there is an answer, often in the middle of a long prompt."""
        sent, body = self._long(1500, stream=False)
        sent.status, sent.reused = 499, None
        link = http.client.HTTPConnection(self._address, timeout=WAIT_S)
        key = {"authorization": f"Bearer {self._secret}", "content-type": "application/json"}
        link.request("POST", CHAT, json.dumps(body), {**key, **self._headers(sent)})
        self._running(sent, ("prefilling", "decoding"))
        link.close()
        self._book.call("chat", 499)

    def _long(self, n_words: int = 60, *, stream: bool = True) -> tuple[Sent, Json]:
        """A request for all that the context has room for."""
        messages = [self._user(n_words)]
        sent = self._new("chat", CHAT, [self._tokens.of_chat(messages)], outcome="cancelled")
        sent.max_answer = N_CONTEXT - sent.n_prompt
        self._book.know(sent.key, *sent.prompts)
        self._book.add(sent)
        return sent, {"messages": messages, "max_tokens": sent.max_answer, "stream": stream}

    def _note_start(self, sent: Sent, answer: httpx.Response) -> None:
        """Of a stream that waited long for its start nothing is known."""
        receipt = json.loads(answer.headers.get("x-keepwarm-receipt", '{"reused": null}'))
        sent.status, sent.reused = answer.status_code, receipt["reused"]


KINDS: dict[str, Callable[[Client], None]] = {
    "chat": Client.chat,
    "turn": Client.turn,
    "second turn": Client.turn,
    "streamed turn": lambda client: client.turn(stream=True),
    "again": Client.again,
    "not stored": lambda client: client.chat("no-store"),
    "only read": lambda client: client.chat("read-only"),
    "ephemeral": lambda client: client.chat("ephemeral"),
    "bounded": Client.bounded,
    "choices": Client.choices,
    "prompts": Client.prompts,
    "response": Client.response,
    "second response": Client.response,
    "message": Client.message,
    "streamed message": lambda client: client.message(stream=True),
    "ollama": Client.ollama,
    "ollama, whole": lambda client: client.ollama(stream=False),
    "ollama's generate": lambda client: client.ollama("/api/generate"),
    "embeddings": Client.embed,
    "ollama's embed": lambda client: client.embed("ollama", "/api/embed"),
    "warm": Client.warm,
    "agent": Client.agent,
    "refused": Client.refused,
    "leave": Client.leave,
    "cancel": Client.cancel,
    "hang up": Client.hang_up,
}
