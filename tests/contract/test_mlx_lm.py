"""Which names of mlx-lm Keepwarm uses, and which cache classes there are.

The facts behind the names stand in `test_mlx_lm_caches.py` (single caches, functions) and
`test_mlx_lm_batch.py` (batches, the generator, known defects), so that a new release of mlx-lm
breaks here and nowhere else.
"""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
from pathlib import Path

import mlx.core as mx
import mlx_lm.models
from mlx_lm.models.cache import KVCache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

import keepwarm

SOURCE = Path(keepwarm.__file__).parent
ROOMS_WITH_MLX_LM = {"kv", "models"}

# What `src/keepwarm` takes from mlx-lm; each name is used by a test below.
USED = {
    "mlx_lm.models.cache": {
        "ArraysCache",
        "BatchKVCache",
        "BatchRotatingKVCache",
        "CacheList",
        "ChunkedKVCache",
        "ConcatenateKVCache",
        "KVCache",
        "QuantizedKVCache",
        "RotatingKVCache",
        "dynamic_roll",
        "make_prompt_cache",
    },
    "mlx_lm.models.deepseek_v41": {"LayerCache"},
    "mlx_lm.models.llama": {"Model", "ModelArgs"},
    "mlx_lm.models.qwen2": {"Model", "ModelArgs"},
    "mlx_lm.models.qwen3": {"Model", "ModelArgs"},
    "mlx_lm.models.switch_layers": {"QuantizedSwitchLinear"},
    "mlx_lm.utils": {"MODEL_REMAPPING", "dequantize_model", "load_model", "load_tokenizer"},
}

# Every cache class of mlx-lm; `keepwarm.kv` classifies each, or refuses it by name.
CACHE_CLASSES = {
    "cache.ArraysCache",
    "cache.BatchKVCache",
    "cache.BatchRotatingKVCache",
    "cache.CacheList",
    "cache.ChunkedKVCache",
    "cache.ConcatenateKVCache",
    "cache.KVCache",
    "cache.LRUPromptCache",  # a store of caches, not a cache
    "cache.QuantizedKVCache",
    "cache.RotatingKVCache",
    "cache._BaseCache",
    "deepseek_v41.LayerCache",
}
# Model files that need a package we do not install.
NOT_IMPORTABLE = {"olmo"}


def imports_of_mlx_lm(tree):
    """(module, name, alias) of everything that is imported from mlx-lm."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(a.name.split(".")[0] == "mlx_lm" for a in node.names), "use from-imports"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mlx_lm":
            yield from ((node.module, a.name, a.asname or a.name) for a in node.names)


def names_from_mlx_lm(tree):
    """(module, name) of every name in use, through a module's alias too."""
    modules = {}
    for module, name, alias in imports_of_mlx_lm(tree):
        if importlib.util.find_spec(module).submodule_search_locations is None:
            yield module, name
        else:
            modules[alias] = f"{module}.{name}"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=alias), attr=name) if alias in modules:
                yield modules[alias], name


def sources():
    """Those that name mlx-lm at all."""
    texts = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    return {path: ast.parse(text) for path, text in texts.items() if "mlx_lm" in text}


def test_the_names_in_use_are_the_names_listed_here():
    """A new name needs a test in this file first."""
    found = {pair for tree in sources().values() for pair in names_from_mlx_lm(tree)}
    listed = {(module, name) for module, names in USED.items() for name in names}
    assert found == listed, {"to list and test": found - listed, "to drop": listed - found}


def test_every_listed_name_is_used_by_a_test_here():
    trees = [ast.parse(p.read_text()) for p in Path(__file__).parent.glob("test_mlx_lm*.py")]
    bodies = [n for t in trees for n in t.body if isinstance(n, ast.FunctionDef | ast.Assign)]
    seen = {n.id for b in bodies for n in ast.walk(b) if isinstance(n, ast.Name)}
    seen |= {n.attr for b in bodies for n in ast.walk(b) if isinstance(n, ast.Attribute)}
    assert set().union(*USED.values()) <= seen


def test_an_alias_hides_no_name():
    """Control for the reader above."""
    code = "from mlx_lm.models import cache as c\nfrom mlx_lm.utils import load as l\nc.KVCache()"
    assert set(names_from_mlx_lm(ast.parse(code))) == {
        ("mlx_lm.models.cache", "KVCache"),
        ("mlx_lm.utils", "load"),
    }


def test_no_private_name_is_imported():
    assert not [name for names in USED.values() for name in names if name.startswith("_")]


def test_experts_are_modules_that_can_be_replaced():
    """`models.row_products` calls them with the same arguments, and adds their bias itself."""
    module = QuantizedSwitchLinear(64, 8, 4, bias=True)
    module.bias = mx.arange(32).reshape(4, 8).astype(mx.float32)
    x, experts = mx.ones((3, 1, 64)), mx.array([0, 1, 3], mx.uint32)
    assert [module.group_size, module.bits, module.mode] == [64, 4, "affine"]
    assert [module[name].ndim for name in ("weight", "scales", "biases")] == [3, 3, 3]
    product = module(x, experts, sorted_indices=True) - module.bias[experts][:, None]
    weights = mx.dequantize(module["weight"], module["scales"], module["biases"], 64, 4)
    assert mx.allclose(product, x @ weights[experts].swapaxes(1, 2), atol=1e-4)


def test_only_two_rooms_know_mlx_lm():
    """So that an upstream change has two rooms to change here, not ten."""
    users = {p for p, tree in sources().items() if list(imports_of_mlx_lm(tree))}
    assert {p.relative_to(SOURCE).parts[0] for p in users} <= ROOMS_WITH_MLX_LM


def test_every_cache_class_of_mlx_lm_is_known(capfd):
    """A new upstream class is classified before users meet it."""
    found, broken = set(), set()
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            loaded = importlib.import_module(f"mlx_lm.models.{module.name}")
        except (Exception, SystemExit):
            broken.add(module.name)
            continue
        found |= {f"{module.name}.{c.__name__}" for c in cache_classes_of(loaded)}
    assert found == CACHE_CLASSES, {"new": found - CACHE_CLASSES, "gone": CACHE_CLASSES - found}
    assert broken <= NOT_IMPORTABLE


def cache_classes_of(module):
    base = inspect.getmro(KVCache)[1]
    for cls in vars(module).values():
        if not inspect.isclass(cls) or cls.__module__ != module.__name__:
            continue
        if issubclass(cls, base) or cls.__name__.endswith("Cache"):
            yield cls
