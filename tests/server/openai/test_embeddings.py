"""`/v1/embeddings`: OpenAI's own client against vectors of a plain forward pass."""

import asyncio
import base64
import json
import socket
from types import SimpleNamespace
from urllib.parse import urlsplit

import mlx.core as mx
import numpy as np
import openai
import pytest
from tokenizers import processors

from keepwarm import config
from keepwarm.engine.engine import Cancel
from keepwarm.errors import Cancelled
from keepwarm.models.load import load
from keepwarm.prefix.blocks import common_prefix
from keepwarm.server.models import embedding
from keepwarm.text.request import Request
from tests.kit.checkpoints import SPECIALS, make_tokenizer, write_checkpoint
from tests.kit.engines import held
from tests.kit.waiting import wait_until
from tests.server.conftest import serve

END = SPECIALS[0]
QUERY = "Instruct: find the words of the document that answer the question of the user. Query: "
TEXTS = ["what is the dog?", "how many days had 1984?", "x" * 90]
FIELDS = Request()
KEYS = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A model whose tokenizer ends a text with a token of its own, with a prompt."""
    path, tokenizer = tmp_path_factory.mktemp("embedder"), make_tokenizer()
    ends = [(END, tokenizer.token_to_id(END))]
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {END}", special_tokens=ends)
    write_checkpoint(path, tokenizer=tokenizer, n_context=512)
    files = {"prompts": {"query": QUERY}}
    (path / "config_sentence_transformers.json").write_text(json.dumps(files))
    return load(str(path), config.load({}, home=None))


@pytest.fixture(scope="module")
def serving_it(embedder, tmp_path_factory):
    def start(**values):
        home = str(tmp_path_factory.mktemp("home"))
        return serve(embedder, config.load({"KEEPWARM_HOME": home}, **values))

    return start


@pytest.fixture(scope="module")
def live(serving_it):
    with serving_it() as server:
        yield server


@pytest.fixture(scope="module")
def client(live):
    return live.openai()


def plain(model, text, dimensions=None):
    tokens = model.tokenizer.encode(text) if isinstance(text, str) else text
    row = np.array(model.module.model(mx.array([tokens]))[0, -1])[:dimensions]
    return row / np.linalg.norm(row)


def assert_close(found, expected):
    np.testing.assert_allclose(np.array(found), expected, atol=2e-6)


def post(live, body, **headers):
    answer = live.post("/v1/embeddings", body, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_vectors_are_those_of_a_plain_forward_pass_alone_and_in_a_batch(client, embedder):
    together = client.embeddings.create(model="any", input=TEXTS)  # the client asks for base64
    numbers = client.embeddings.create(model="any", input=TEXTS, encoding_format="float")
    lengths = [len(embedder.tokenizer.encode(text)) for text in TEXTS]
    assert together.usage.prompt_tokens == together.usage.total_tokens == sum(lengths)
    assert together.model == "tiny"
    assert embedder.tokenizer.encode(TEXTS[0])[-1] == embedder.tokenizer.encode(END)[0]
    for index, text in enumerate(TEXTS):
        alone = client.embeddings.create(model="any", input=text)
        expected = plain(embedder, text)
        for answer, at in ((together, index), (numbers, index), (alone, 0)):
            assert answer.data[at].index == at
            assert_close(answer.data[at].embedding, expected)
    assert np.abs(expected - plain(embedder, TEXTS[0])).max() > 0.01  # control


def test_tokens_may_be_sent_and_base64_asked_for(live, client, embedder):
    lists = [embedder.tokenizer.encode(text) for text in TEXTS]
    for given in (lists, lists[1]):
        found = client.embeddings.create(model="any", input=given).data
        for text, each in zip(TEXTS if given is lists else TEXTS[1:2], found, strict=True):
            assert_close(each.embedding, plain(embedder, text))
    (coded,) = post(live, {"input": TEXTS[1], "encoding_format": "base64"})["data"]
    numbers = np.frombuffer(base64.b64decode(coded["embedding"]), "<f4")
    assert_close(numbers, plain(embedder, TEXTS[1]))


def test_fewer_dimensions_have_length_1_again(client, embedder):
    found = client.embeddings.create(model="any", input="a dog", dimensions=8).data[0].embedding
    assert_close(found, plain(embedder, "a dog", 8))
    assert len(found) == 8
    with pytest.raises(openai.BadRequestError, match=r"dimensions is 65, but the .* have 64"):
        client.embeddings.create(model="any", input="a dog", dimensions=65)


def test_only_a_shared_instruction_is_kept(live, embedder):
    texts = [QUERY + text for text in TEXTS]
    first, *others = (embedder.tokenizer.encode(text) for text in texts)
    n_shared = min(common_prefix(first, other) for other in others)
    first = post(live, {"input": texts})
    again = post(live, {"input": texts})
    other = post(live, {"input": QUERY + "x another one"})
    total = first["usage"]["prompt_tokens"]
    receipts = [answer["keepwarm"] for answer in (first, again, other)]
    assert sum(receipts[0]["reused"].values()) == 2 * n_shared  # once it was computed
    assert sum(receipts[1]["reused"].values()) == 3 * n_shared - 1  # one token is always fed
    assert sum(receipts[2]["reused"].values()) == n_shared
    assert all(sum(r["reused"].values()) + r["recomputed"] == r["prompt_tokens"] for r in receipts)
    assert receipts[0]["prompt_tokens"] == total
    for answer in (first, again):
        for text, each in zip(texts, answer["data"], strict=True):
            assert_close(each["embedding"], plain(embedder, text))


def test_a_policy_that_keeps_nothing_keeps_nothing(live):
    texts = ["Neither of these two is kept by the server, says the user: " + x for x in "ab"]
    for _ in range(2):
        answer = post(live, {"input": texts, "keepwarm": {"cache": "no-store"}})
        assert answer["keepwarm"]["reused"] == {}
    post(live, {"input": texts})
    assert post(live, {"input": texts})["keepwarm"]["reused"] != {}  # control


def test_a_prompt_of_the_model_is_put_first(live, embedder):
    found = post(live, {"input": "a dog", "prompt_name": "query"})["data"][0]["embedding"]
    assert_close(found, plain(embedder, f"{QUERY}a dog"))
    answer = live.post("/v1/embeddings", {"input": "a dog", "prompt_name": "passage"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_name")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"input": []}, 400, "at least one text"),
        ({"input": ["a"] * 2049}, 400, "There are 2,049 inputs; send 1 to 2,048."),
        ({"input": "dog " * 600}, 400, "maximum context length"),
        ({"input": [[1, 9999]]}, 400, "contains the token 9999"),
        ({"input": {"text": "a"}}, 400, "input"),
    ],
)
def test_a_bad_input_is_refused_before_anything_runs(live, body, status, said):
    before = live.host.engine.stats().counters["requests"]
    answer = live.post("/v1/embeddings", body)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True)
    assert live.host.engine.stats().counters["requests"] == before


def test_the_tokens_of_all_inputs_are_limited(live, monkeypatch):
    monkeypatch.setattr(embedding, "MAX_TOKENS", 100)
    post(live, {"input": [[5] * 50] * 2})
    answer = live.post("/v1/embeddings", {"input": [[5] * 50, [5] * 51]})
    assert answer.json()["error"]["message"].startswith("The inputs have more than 100 tokens")


def test_keys_do_not_share_an_instruction_and_special_tokens_are_text(serving_it, embedder):
    texts = [f"{QUERY}{END} {text}" for text in TEXTS]
    with serving_it(api_keys="one,two", raw_special_tokens=False) as live:
        own = [post(live, {"input": texts}, **KEYS[0]) for _ in range(2)]
        others = post(live, {"input": texts}, **KEYS[1])
        assert live.post("/v1/embeddings", {"input": "a"}).status_code == 401
    assert others["keepwarm"]["reused"] == own[0]["keepwarm"]["reused"]
    assert own[1]["keepwarm"]["reused"] != own[0]["keepwarm"]["reused"]  # control
    spelled = embedder.tokenizer.encode(texts[0])
    assert own[0]["usage"]["prompt_tokens"] > 3 * (len(spelled) - len(TEXTS[0]))
    assert np.abs(np.array(own[0]["data"][0]["embedding"]) - plain(embedder, spelled)).max() > 0.01


def test_an_answer_runs_beside_a_batch_which_ends_with_its_client(live):
    """Inputs are a few requests at a time: others go on, and no more are begun for nobody."""
    engine, n_inputs = live.host.engine, 1500
    texts = [f"{i} of the documents" for i in range(n_inputs)]
    before = engine.stats().counters["requests"]
    address = urlsplit(live.url)
    body = json.dumps({"input": texts}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {address.netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port)) as batch:
        batch.sendall(head.encode() + body)
        wait_until(lambda: engine.stats().counters["requests"] > before)
        messages = [{"role": "user", "content": "what is the answer?"}]
        asked = {"messages": messages, "max_tokens": 5, "temperature": 0}
        assert live.post("/v1/chat/completions", asked).status_code == 200
        with held(engine):
            assert engine.stats().counters["requests"] - before < n_inputs
            wait_until(lambda: engine._is_busy)
            batch.close()
            wait_until(lambda: any(isinstance(each, Cancel) for each in [*engine._commands]))
    wait_until(lambda: not engine._is_busy)
    assert engine.stats().counters["requests"] - before < n_inputs
    assert engine.stats().counters["cancelled"] >= 1


class Leaving:
    """A host whose client goes away while inputs are handed to the engine."""

    def __init__(self, host):
        self.host, self.name = host, host.name
        self.n_started, self.leave = 0, lambda: None

    async def run(self, prepared, slot):
        answers = await self.host.run(prepared, slot)
        self.n_started += len(prepared)
        self.leave()
        return answers


def test_inputs_of_a_client_that_left_meanwhile_are_not_begun(live):
    host, work = Leaving(live.host), embedding._Preparing(live.host.engine, FIELDS, False)
    plan = work.plan([[5, i] for i in range(20)], None, None)
    slot = SimpleNamespace(resume=asyncio.to_thread)
    answer = embedding.EmbeddingAnswer(host, plan, slot)
    host.leave = answer.cancel
    waiting = asyncio.run_coroutine_threadsafe(answer.wait(), live.loop)
    with pytest.raises(Cancelled):
        waiting.result(300)
    assert host.n_started == embedding.AT_ONCE


def test_a_text_that_is_too_long_may_be_shortened(live, embedder):
    """For APIs that want it: as much of its beginning as the context takes."""
    work = embedding._Preparing(live.host.engine, FIELDS, True)
    text = " ".join(map(str, range(400)))
    (found,), _ = work.plan([text], None, None)
    tokens = embedder.tokenizer.encode(text)
    assert 490 < len(found.tokens) < 512 < len(tokens)
    assert found.tokens[:-1] == tokens[: len(found.tokens) - 1]
    assert found.tokens[-1] == tokens[-1]
