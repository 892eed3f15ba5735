"""A model's files are anyone's: what is in them neither stops a server nor fills its memory."""

import json
import struct
from dataclasses import replace

import pytest
from tokenizers import Regex, pre_tokenizers

from keepwarm import config
from keepwarm.errors import BadModelFile
from keepwarm.models.gguf.file import read_header
from keepwarm.models.load import load
from keepwarm.prefix.recent import RecentPrompts
from keepwarm.server.http.permits import LONG_BODY
from keepwarm.text.prepare import Preparer
from keepwarm.text.request import Request
from keepwarm.text.template import Template
from tests.kit.checkpoints import CHATML, make_tokenizer, write_checkpoint
from tests.server.conftest import serve
from tests.text.formats import WEATHER

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
PANICS = "a" * 40 + "!"
APIS = {
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
}


def test_a_template_that_does_not_end_is_refused_at_load(tmp_path):
    path = write_checkpoint(tmp_path, template=LOOPS + CHATML)
    model = load(str(path), config.load({"KEEPWARM_HOME": str(tmp_path)}))
    with pytest.raises(BadModelFile, match="chat template does not come to an end"):
        Preparer(model, 320, RecentPrompts())


def test_a_long_template_is_no_endless_one(tmp_path):
    branches = [f"{{% if messages[0].role == 'x{n}' %}}{n}{{% endif %}}" for n in range(400)]
    path = write_checkpoint(tmp_path, template="".join(branches) + CHATML)
    model = load(str(path), config.load({"KEEPWARM_HOME": str(tmp_path)}))
    assert Template.of(model.tokenizer).takes_system


@pytest.mark.parametrize("place", ["num_hidden_layers", "n_layer", "text_config"])
def test_a_number_of_layers_beyond_the_tensors_is_refused_before_any_is_made(tmp_path, place):
    path = write_checkpoint(tmp_path)
    fields = json.loads((path / "config.json").read_text())
    many = {place: 10**7} if place != "text_config" else {place: {"num_hidden_layers": 10**7}}
    (path / "config.json").write_text(json.dumps(fields | many))
    with pytest.raises(BadModelFile, match="too few for the 10000000 layers"):
        load(str(path), config.load({"KEEPWARM_HOME": str(tmp_path)}))


@pytest.mark.parametrize("n_tensors", [0, 1])
def test_a_gguf_of_an_alignment_beyond_its_end_is_refused(tmp_path, n_tensors):
    name, uint64 = b"general.alignment", 10
    head = struct.pack("<IQQQ", 3, n_tensors, 1, len(name)) + name
    value = struct.pack("<IQ", uint64, 1 << 62)
    tensor = struct.pack("<Q1sIQIQ", 1, b"t", 1, 256, 0, 0) * n_tensors
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + head + value + tensor + bytes(2048))
    with pytest.raises(BadModelFile, match=f"its alignment is {1 << 62}, beyond its end"):
        read_header(path)


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A server whose tokenizer has a regular expression that gives up on some texts."""
    tokenizer = make_tokenizer()
    split = pre_tokenizers.Split(Regex("(?:a|a)+$"), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    path = write_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=tokenizer)
    settings = config.load({"KEEPWARM_HOME": str(tmp_path_factory.mktemp("home"))})
    model = replace(load(str(path), settings), n_context=1 << 20)
    with serve(model, settings) as server:
        yield server


@pytest.mark.parametrize("path", [*APIS, "in the preparing process"])
def test_a_tokenizer_that_panics_refuses_the_text(live, path):
    is_long = path not in APIS
    path = "/v1/messages" if is_long else path
    field = APIS[path]
    text = "the fox " * (LONG_BODY // 4) * is_long + PANICS
    value = text if field != "messages" else [{"role": "user", "content": text}]
    answer = live.post(path, {field: value, "max_tokens": 1})
    assert answer.status_code == 400, answer.text
    assert "tokenizer cannot read this text" in answer.text


def test_a_tool_result_that_panics_where_it_is_written_back_is_left_out(live):
    """The prompt itself has other texts."""
    preparer = live.host.engine.preparer
    talk = [{"role": "user", "content": "Hi"}]
    prepared = preparer.prepare(Request(messages=talk, tools=[WEATHER]))
    results = [{"role": "tool", "content": f"1→{text}"} for text in ("the fox", PANICS)]
    asked = Request(messages=[*talk, *results], tools=[WEATHER])
    (found,) = preparer.with_rewritten(replace(prepared, request=asked)).rewritten
    assert preparer.markup.tokenizer.decode(list(found)) == "the fox"
    fine = live.post("/v1/completions", {"prompt": "the fox", "max_tokens": 1})
    assert fine.status_code == 200
