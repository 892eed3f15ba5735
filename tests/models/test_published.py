"""Vision-language checkpoints in their published layouts: the language part is exactly mlx-lm's."""

import json
import sys
from dataclasses import MISSING, fields, replace
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import pytest
from benchmarks.zoo.published import LAYOUTS, build_text, write
from mlx_lm.utils import load_model

from keepwarm import config
from keepwarm.cache.identity import identity_of
from keepwarm.errors import BadModelFile, UnsupportedModel
from keepwarm.models.load import load, read_model
from keepwarm.models.published import read_rope_changes
from tests.kit.checkpoints import CHATML, make_tokenizer, tokenizer_config, write_checkpoint
from tests.server.conftest import serve

TOKENS = mx.array([[5, 17, 100, 9, 44, 101, 12, 8] * 5])
EXACT = 1e-4  # weights that lie in memory in another order are added in another one
SMALL = LAYOUTS["Qwen3-VL 4B"]


def publish(layout, folder, **described):
    """A checkpoint with the files that stand beside weights and config; mlx-lm's own model."""
    module = build_text(layout)
    write(layout, module, folder)
    make_tokenizer(n_vocab=320).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config() | described))
    return module


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_layout_loads_and_is_exact(name, tmp_path):
    own = publish(LAYOUTS[name], tmp_path)(TOKENS)
    loaded = read_model(name, tmp_path).module(TOKENS)
    assert mx.abs(own - loaded).max().item() < EXACT
    assert mx.abs(own[:, :-1] - loaded[:, 1:]).max().item() > 100 * EXACT


def test_every_layout_is_in_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    table = page.partition("<!-- published layouts -->")[2].partition("<!-- end -->")[0]
    rows = [line.split(" | ") for line in table.splitlines()[3:]]
    assert {model.removeprefix("| ") for model, *_ in rows} == {
        name.partition(",")[0].removesuffix(" 4B") for name in LAYOUTS
    }
    assert all(f"`{layout.model_type}`" in table for layout in LAYOUTS.values())


def test_length_that_a_published_config_leaves_out(tmp_path):
    publish(LAYOUTS["Gemma 3"], tmp_path)
    assert read_model("gemma", tmp_path).n_context == 131_072
    publish(LAYOUTS["Gemma 3, fine-tuned"], tmp_path)
    assert read_model("gemma", tmp_path).n_context == 4096


def test_template_is_found_where_processors_have_it(tmp_path):
    publish(SMALL, tmp_path, chat_template=None)
    assert not read_model("qwen", tmp_path).tokenizer.has_chat_template
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert read_model("qwen", tmp_path).tokenizer.chat_template == CHATML
    publish(SMALL, tmp_path, chat_template="{{ messages }}")
    assert read_model("qwen", tmp_path).tokenizer.chat_template == "{{ messages }}"


def test_broken_template_is_refused(tmp_path):
    publish(SMALL, tmp_path, chat_template=None)
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(BadModelFile, match="The tokenizer of"):
        read_model("qwen", tmp_path)


def test_tokenizer_that_is_code_is_named(tmp_path):
    publish(LAYOUTS["Kimi-VL"], tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "tiktoken.model")
    with pytest.raises(BadModelFile, match="has no tokenizer"):
        read_model("kimi", tmp_path)
    named = {"auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(UnsupportedModel, match="is code that comes with the model"):
        read_model("kimi", tmp_path)


def test_type_that_mlx_lm_does_not_have_is_named(tmp_path):
    publish(replace(SMALL, model_type="perceiver_vl"), tmp_path)
    with pytest.raises(UnsupportedModel, match="'perceiver_vl'"):
        read_model("perceiver", tmp_path)


def test_missing_weight_of_the_language_part_is_told(tmp_path):
    publish(replace(SMALL, names={"norm": "visual", **SMALL.names}), tmp_path)
    with pytest.raises(BadModelFile, match="not a complete model"):
        read_model("qwen", tmp_path)


def test_a_head_whose_file_is_missing_is_told(tmp_path):
    publish(LAYOUTS["Qwen2.5-VL"], tmp_path)
    (file,) = tmp_path.glob("model*.safetensors")
    weights = mx.load(str(file))
    mx.eval(weights)
    heads = [name for name in weights if "lm_head" in name]
    kept = {name: array for name, array in weights.items() if name not in heads}
    mx.save_safetensors(str(file), kept, {"format": "mlx"})
    read_model("qwen", tmp_path)
    places = dict.fromkeys(kept, file.name) | dict.fromkeys(heads, "model-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(BadModelFile, match="not a complete model"):
        read_model("qwen", tmp_path)


# The settings of RoPE, as transformers 5 writes them


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
}


def logits_of(folder, **described):
    """Of a tiny model whose config says this of RoPE."""
    write_checkpoint(folder)
    file = folder / "config.json"
    known = json.loads(file.read_text())
    del known["rope_theta"]
    file.write_text(json.dumps(known | described))
    return read_model("tiny", folder).module(TOKENS)


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ({"rope_theta": 5e5, "rope_type": "default"}, {"rope_theta": 5e5}),
        ({"rope_theta": 5e5, **LLAMA3}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    ],
)
def test_rope_of_transformers_5_is_that_of_the_old_names(tmp_path, new, old):
    first = logits_of(tmp_path / "new", rope_parameters=new)
    assert mx.array_equal(first, logits_of(tmp_path / "old", **old))
    assert not mx.array_equal(first, logits_of(tmp_path / "none"))


def test_rope_of_two_kinds_of_layers():
    config = {"model_type": "gemma3_text", "rope_parameters": KINDS}
    found = read_rope_changes(config)
    assert (found["rope_theta"], found["rope_local_base_freq"]) == (5e5, 2e3)
    assert "rope_scaling" not in found
    assert "rope_theta" not in read_rope_changes({**config, "rope_theta": 7.0})


@pytest.mark.parametrize(
    ("kind", "given", "named"),
    [
        ("llama", KINDS, "rope_local_base_freq"),
        ("gpt_neox", {"rope_theta": 5e5, **LLAMA3}, "rope_scaling"),
        ("dbrx", {"rope_theta": 5e5}, "rope_theta"),
        ("llama", {"rope_theta": 5e5, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_rope_that_would_not_be_read_is_refused_by_name(kind, given, named):
    with pytest.raises(UnsupportedModel, match=f"'{kind}' read no {named}"):
        read_rope_changes({"model_type": kind, "rope_parameters": given})


@pytest.mark.parametrize(
    ("kind", "partial"), [("llama", 1.0), ("phi3", 0.5), ("minimax", 0.5), ("deepseek_v3", 0.5)]
)
def test_rotated_part_is_read_where_a_model_knows_it_under_any_name(kind, partial):
    given = {"rope_theta": 5e5, "partial_rotary_factor": partial}
    found = read_rope_changes({"model_type": kind, "rope_parameters": given})
    assert found["partial_rotary_factor"] == partial


def test_rope_that_mlx_lm_reads_itself_is_left_to_it():
    assert read_rope_changes({"model_type": "gemma4_text", "rope_parameters": KINDS}) == {}
    assert read_rope_changes({"model_type": "olmo3", "rope_theta": 5e5}) == {}


LONG = {"rope_type": "longrope", "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}


@pytest.mark.parametrize(("kind", "given"), [("phi3", LONG), ("exaone_moe", LLAMA3)])
@pytest.mark.parametrize("old", [{}, {"rope_scaling": None, "rope_theta": None}])
def test_scaling_reaches_models_that_read_the_frequency_alone(kind, given, old):
    config = {"model_type": kind, "rope_parameters": {"rope_theta": 5e5, **given}, **old}
    args = args_of(kind, config | read_rope_changes(config))
    assert args.rope_theta == 5e5
    assert args.rope_scaling.items() >= {"type": given["rope_type"], **given}.items()


def args_of(kind, config):
    """With 1 for what it must have besides."""
    found = import_module(f"mlx_lm.models.{kind}").ModelArgs
    needed = {each.name: 1 for each in fields(found) if each.default is MISSING}
    return found.from_dict(needed | config)


def test_blocks_of_another_rope_are_of_another_namespace(tmp_path):
    """mlx-lm's own reader takes a frequency of its own from such a config: other keys."""
    logits_of(tmp_path, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    settings = config.load({}, home=tmp_path / "home")
    ours, theirs = read_model("tiny", tmp_path).module, load_model(tmp_path)[0]
    assert identity_of(ours, tmp_path, settings) != identity_of(theirs, tmp_path, settings)


IMAGES = {
    "/v1/chat/completions": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    "/v1/messages": {"type": "image", "source": {"type": "base64", "data": "AA"}},
    "/v1/responses": {"type": "input_image", "image_url": "data:image/png;base64,AA"},
}


def test_text_is_answered_and_an_image_refused_by_name_before_any_work(tmp_path):
    (tmp_path / "model").mkdir()
    longer = {"vocab_size": 320}
    layout = replace(SMALL, default=longer, text={**SMALL.text, **longer})
    publish(layout, tmp_path / "model")
    model = load(str(tmp_path / "model"), config.load({}, home=None))
    assert model.n_context < sys.maxsize
    with serve(model, config.load({"KEEPWARM_HOME": str(tmp_path / "home")})) as live:
        for path, image in IMAGES.items():
            asked = [{"role": "user", "content": [image]}]
            name = "input" if path.endswith("responses") else "messages"
            refused = live.post(path, {name: asked, "max_tokens": 2})
            assert refused.status_code == 400
            assert "image" in refused.text
            assert "reads text only" in refused.text
        assert live.host.engine.stats().counters["prefilled_tokens"] == 0
        turns = [{"role": "user", "content": "Hello"}]
        body = {"messages": turns, "max_tokens": 2, "temperature": 0}
        costs = [
            live.post("/v1/chat/completions", body).json()["keepwarm"]["recomputed"] for _ in "12"
        ]
        assert costs[0] > costs[1]
