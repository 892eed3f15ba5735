"""What the files of sentence-transformers say, and checkpoints as embedders are published."""

import json

import mlx.core as mx
import numpy as np
import pytest

from keepwarm import config
from keepwarm.errors import BadField, UnsupportedModel
from keepwarm.models.embedder import read_embedder
from keepwarm.models.load import load
from tests.kit.checkpoints import write_checkpoint

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 3, "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
QUERY = "Instruct: find what answers the query\nQuery:"
OLD = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "include_prompt": True}


def write(directory, pooling, modules=(TRANSFORMER, POOLING, NORMALIZE), **options):
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "config_sentence_transformers.json").write_text(json.dumps(options))
    return directory


@pytest.mark.parametrize(
    "pooling", [OLD | {"pooling_mode_lasttoken": True}, {"pooling_mode": "lasttoken"}]
)
def test_a_decoder_embedder_is_read(tmp_path, pooling):
    found = read_embedder(write(tmp_path, pooling, prompts={"query": QUERY, "document": ""}), {})
    found.check()
    assert found.prompt("query") == QUERY
    assert found.prompt("document") == found.prompt(None) == ""
    with pytest.raises(BadField, match="no prompt 'clustering', only 'query', 'document'"):
        found.prompt("clustering")


def test_a_default_prompt_is_used(tmp_path):
    path = write(
        tmp_path, {"pooling_mode": "lasttoken"}, prompts={"q": QUERY}, default_prompt_name="q"
    )
    assert read_embedder(path, {}).prompt(None) == QUERY


def test_a_model_without_these_files_is_pooled_by_its_last_token(tmp_path):
    for path in (tmp_path, tmp_path / "model.gguf"):
        read_embedder(path, {}).check()
    with pytest.raises(BadField, match="no prompt 'query', only none"):
        read_embedder(tmp_path, {}).prompt("query")


@pytest.mark.parametrize(
    ("pooling", "modules", "said"),
    [
        (OLD | {"pooling_mode_mean_tokens": True}, None, "pools by mean, which"),
        ({"pooling_mode": "cls"}, None, "pools by cls, which"),
        ({"pooling_mode": "lasttoken"}, (TRANSFORMER, POOLING, DENSE), "has a layer Dense behind"),
    ],
)
def test_what_would_give_other_vectors_is_refused_by_name(tmp_path, pooling, modules, said):
    path = write(tmp_path, pooling, modules or (TRANSFORMER, POOLING, NORMALIZE))
    with pytest.raises(UnsupportedModel, match=said):
        read_embedder(path, {}).check()


def test_what_cannot_be_read_is_refused_and_the_model_still_loads(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "modules.json").write_text('[{"type": 3}]')
    model = load(str(tmp_path), config.load({}, home=None))
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        model.embedder.check()


@pytest.mark.parametrize("said", [{"use_bidirectional_attention": True}, {"is_causal": False}])
def test_one_that_reads_both_ways_is_refused(tmp_path, said):
    with pytest.raises(UnsupportedModel, match="in both directions"):
        read_embedder(tmp_path, said).check()


def test_an_encoder_is_refused_by_name(tmp_path):
    write_checkpoint(tmp_path, shape={"model_type": "xlm-roberta"})
    with pytest.raises(UnsupportedModel, match=r"'xlm-roberta', which .* use a decoder"):
        load(str(tmp_path), config.load({}, home=None))


@pytest.mark.parametrize("is_flat", [True, False])
def test_a_checkpoint_without_its_head_loads(tmp_path, is_flat):
    """As Qwen3-Embedding is published: 8B says that it has a head, which is not in the file."""
    whole = load(str(write_checkpoint(tmp_path / "whole")), config.load({}, home=None))
    path = write_checkpoint(tmp_path / "bare")
    kept = {
        name.removeprefix("model.") if is_flat else name: array
        for name, array in mx.load(str(path / "model.safetensors")).items()
        if not name.startswith("lm_head")
    }
    mx.save_safetensors(str(path / "model.safetensors"), kept, {"format": "pt"})
    bare = load(str(path), config.load({}, home=None))
    tokens = mx.array([[5, 6, 7, 200]])
    np.testing.assert_array_equal(np.array(bare.backbone(tokens)), np.array(whole.backbone(tokens)))
    assert bare.module(tokens).shape == whole.module(tokens).shape
