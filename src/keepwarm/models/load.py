"""Loading a model: weights, tokenizer, config."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mlx.core as mx
from huggingface_hub.errors import StrictDataclassError
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING, dequantize_model, load_model, load_tokenizer
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig

from keepwarm import blas
from keepwarm import config as configuration
from keepwarm.config import Settings
from keepwarm.device import kernels
from keepwarm.device.space import require_memory
from keepwarm.errors import BadModelFile, KeepwarmError, UnsupportedModel
from keepwarm.models import row_products
from keepwarm.models.catalog import (
    FileStamp,
    file_stamps,
    locate,
    n_context,
    read_config,
    read_generation_config,
)
from keepwarm.models.embedder import Embedder, read_embedder
from keepwarm.models.gguf import model as gguf
from keepwarm.models.gguf.tokenizer import write_tokenizer
from keepwarm.models.published import (
    config_changes,
    is_vision_language,
    model_classes,
    read_rope_changes,
)
from keepwarm.models.row_products import ProductTrials

PIECE_BYTES = 64 << 20
ENCODERS = ("bert", "mpnet", "electra", "deberta")  # in names of model types
ELSE_EMBED = "; for embeddings use a decoder, as Qwen3-Embedding, or a server that runs encoders."
FLAT = "embed_tokens.weight"
HEADLESS = {"tie_word_embeddings": True}  # the head is then that of the embeddings
# Tokens whose logits mlx-lm's model sets by number; with fewer it writes into foreign memory.
MIN_VOCABULARY = {"phi3small": 100_352}
LAYER_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers"),
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken")
INDEX = "model.safetensors.index.json"
PROCESSOR_TEMPLATE = "chat_template.json"  # where older processors of images have it


@dataclass(frozen=True)
class Model:
    """A loaded model with its tokenizer."""

    name: str  # as requested
    path: Path  # the directory or .gguf file that the weights came from
    module: Any  # mlx-lm's model, an mlx.nn.Module
    tokenizer: Any  # mlx-lm's TokenizerWrapper
    config: dict[str, Any]
    n_context: int  # tokens, prompt and answer together
    n_bytes: int = 0  # of the weights
    generation_config: dict[str, Any] = field(default_factory=dict)  # the makers' sampling
    embedder: Embedder = field(default_factory=Embedder)  # what its files say about vectors
    trials: ProductTrials | None = None  # of faster products, which the engine runs while idle
    stamps: frozenset[FileStamp] = frozenset()  # of its files, as they were read

    @property
    def backbone(self) -> Any:
        """The module without its head; it returns hidden states instead of logits."""
        whole = self.module
        found = getattr(whole, "model", None) or getattr(
            getattr(whole, "language_model", None), "model", None
        )
        if found is None:
            raise UnsupportedModel(
                f"mlx-lm does not give the hidden states of {self.name}, so it cannot embed; use "
                "another model."
            )
        return found


class _Parts(NamedTuple):
    module: Any  # weights still lazy
    tokenizer: Future[Any]
    config: dict[str, Any]


def load(
    name: str,
    settings: Settings | None = None,
    report: Callable[[str], None] | None = None,
    make_room: Callable[[str, int], None] | None = None,
) -> Model:
    """The model of that name: built-in alias, directory, .gguf file or hub id.

    Downloads it if missing. All weights are in memory on return, so any thread may run it.
    `report` is called with progress messages, such as "reading weights, 40 %"; `make_room` with the
    bytes of the weights, before they are read: it raises if they do not fit.
    """
    settings = settings or configuration.load()
    blas.start(settings.home)
    kernels.start(settings.home)
    report = report or (lambda _: None)
    report("finding its files")
    model = read_model(name, locate(name, settings), report, make_room or require_memory)
    trials = row_products.speed_up(model.module, settings.home)
    own = model.n_context
    return replace(model, n_context=min(own, settings.context or own), trials=trials)


def read_model(
    name: str,
    path: Path,
    report: Callable[[str], None] = lambda _: None,
    make_room: Callable[[str, int], None] = require_memory,
) -> Model:
    """The model in a directory or .gguf file, which a stranger may have made."""
    report("opening its files")
    stamps = file_stamps(path)
    # Reading the tokenizer keeps Python busy, reading weights MLX and the disk.
    with ThreadPoolExecutor(1, thread_name_prefix="keepwarm-tokenizer") as beside:
        is_file = path.is_file()
        parts = _read_gguf(path, beside, report) if is_file else _read_directory(path, beside)
        n_bytes = _weights_bytes(parts.module)
        make_room(name, n_bytes)
        _evaluate(path, parts.module, n_bytes, report)
        tokenizer = parts.tokenizer.result()
    config, generation = parts.config, read_generation_config(path)
    module, size, embedder = parts.module, n_context(config), read_embedder(path, config)
    if file_stamps(path) != stamps:
        raise BadModelFile(f"The files of {path} were changed while they were read; load it again.")
    found = Model(name, path, module, tokenizer, config, size, n_bytes, generation, embedder)
    return replace(found, stamps=stamps)


def _weights_bytes(module: Any) -> int:
    """Bytes of all weights, as this device computes with them; they are not read yet."""
    _set_compute_dtype(module)
    return sum(array.nbytes for array in _weights(module))


def _weights(module: Any) -> list[mx.array]:
    found: Any = tree_flatten(module.parameters(), destination={})
    return list(found.values())


def _evaluate(path: Path, module: Any, n_bytes: int, report: Callable[[str], None]) -> None:
    """Read all weights."""
    try:
        _read_weights(_weights(module), n_bytes, report)
        mx.eval(module)  # not its parameters alone: some arrays, as of the RoPE, are none
    except RuntimeError as error:
        raise BadModelFile(
            f"The weights of {path} cannot be read ({error}); download the model again."
        ) from error


def _read_weights(weights: Iterable[mx.array], n_bytes: int, report: Callable[[str], None]) -> None:
    """They are lazy until now. Read in pieces, so that progress can be told."""
    done = 0
    for piece in _pieces(weights):
        report(f"reading weights, {100 * done // n_bytes} %")
        mx.eval(piece)
        done += sum(array.nbytes for array in piece)


def _pieces(arrays: Iterable[mx.array]) -> Iterator[list[mx.array]]:
    piece: list[mx.array] = []
    for array in arrays:
        piece.append(array)
        if sum(each.nbytes for each in piece) >= PIECE_BYTES:
            yield piece
            piece = []
    if piece:
        yield piece


def _read_gguf(path: Path, beside: Executor, report: Callable[[str], None]) -> _Parts:
    checkpoint = gguf.read(path, report)
    tokenizer = beside.submit(_read_gguf_tokenizer, path, checkpoint)
    return _Parts(gguf.build(checkpoint), tokenizer, checkpoint.config)


def _read_gguf_tokenizer(path: Path, checkpoint: gguf.GGUFModel) -> Any:
    with TemporaryDirectory() as temporary:
        write_tokenizer(path, checkpoint.metadata, Path(temporary))
        return _read_tokenizer(Path(temporary), checkpoint.config, path)


def _read_directory(path: Path, beside: Executor) -> _Parts:
    _check_vocabulary(path, read_config(path))
    if not any(path.glob("model*.safetensors")):
        raise BadModelFile(f"{path} has no weights (model*.safetensors); download the model again.")
    if not any(any(path.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise _no_tokenizer(path)
    files = sorted(path.glob("model*.safetensors"))
    names = {name for file in files for name in _check_weights(file)}
    _check_layers(path, read_config(path), len(names))
    module, config = _read_module(path, names | _missing_names(path, files))
    return _Parts(module, beside.submit(_read_tokenizer, path, config, path), config)


def _no_tokenizer(path: Path) -> KeepwarmError:
    described = path / "tokenizer_config.json"
    if described.is_file() and '"auto_map"' in described.read_text(errors="replace"):
        return UnsupportedModel(
            f"The tokenizer of {path} is code that comes with the model (auto_map in "
            "tokenizer_config.json), which is never run; add a tokenizer.json."
        )
    return BadModelFile(f"{path} has no tokenizer (tokenizer.json); download the model again.")


def _check_vocabulary(path: Path, config: dict[str, Any]) -> None:
    kind, n_tokens = config["model_type"], config.get("vocab_size")
    least = MIN_VOCABULARY.get(str(kind), 0)
    if isinstance(n_tokens, int) and n_tokens < least:
        raise UnsupportedModel(
            f"{path} has {n_tokens} tokens, but mlx-lm runs {kind!r} only with {least} or more."
        )


def _check_layers(path: Path, config: dict[str, Any], n_tensors: int) -> None:
    """mlx-lm makes every layer before it looks for the weights, of which each has one or more."""
    inner = [value for value in config.values() if isinstance(value, dict)]
    for name in LAYER_COUNTS:
        for found in (each.get(name) for each in (config, *inner)):
            if isinstance(found, int) and found > n_tensors:
                raise BadModelFile(
                    f"{path} has {n_tensors} tensors, too few for the {found} layers of its "
                    f"config.json ({name}); download the model again."
                )


def _check_weights(file: Path) -> list[str]:
    """Check the whole header before MLX uses it, which trusts every offset in it; the names."""
    try:
        with safe_open(file, framework="numpy") as weights:
            return list(weights.keys())
    except (SafetensorError, OSError) as error:
        raise BadModelFile(
            f"{file} is not a complete safetensors file ({error}); download the model again."
        ) from error


def _missing_names(path: Path, files: Collection[Path]) -> set[str]:
    """Of weights in files that are missing here, unless the index is about other files altogether.

    A head that is missing is none that was left out on purpose.
    """
    here = {file.name for file in files}
    try:
        shards = json.loads((path / INDEX).read_text())["weight_map"]
        is_stale = here.isdisjoint(shards.values())
        return set() if is_stale else {name for name in shards if shards[name] not in here}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return set()


def _read_module(path: Path, names: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """Embedders are often saved without a head, and some without the prefix of their names."""
    is_flat = FLAT in names
    try:
        module, config = load_model(path, lazy=True, strict=not is_flat, **_options(path, names))
        if is_flat:
            _load_flat(path, module)
        return module, config
    except SystemExit as error:  # some of mlx-lm's models end the program if a package is missing
        raise UnsupportedModel(
            f"{path} is of architecture {read_config(path)['model_type']!r}, which mlx-lm cannot "
            "run here: its module ends the program, usually because a package is missing."
        ) from error
    except UnsupportedModel:
        raise
    except Exception as error:  # mlx-lm's models raise all kinds of errors on an unexpected config
        raise _load_error(path, error) from error


def _options(path: Path, names: Collection[str]) -> dict[str, Any]:
    """In which words mlx-lm is to read a config, and the names of weights."""
    config = read_config(path)
    if is_vision_language(config):
        changes = config_changes(config, names)
        return {"model_config": changes, "get_model_classes": model_classes}
    has_head = any("lm_head" in name for name in names)
    is_headless = not has_head and (FLAT in names or f"model.{FLAT}" in names)
    return {"model_config": read_rope_changes(config) | (HEADLESS if is_headless else {})}


def _load_flat(path: Path, module: Any) -> None:
    weights: dict[str, mx.array] = {}
    for file in path.glob("model*.safetensors"):
        arrays: Any = mx.load(str(file))
        weights |= {f"model.{name}": array for name, array in arrays.items()}
    module.load_weights(list(module.sanitize(weights).items()))


def _load_error(path: Path, error: Exception) -> KeepwarmError:
    lines = str(error).strip().splitlines()[:2]  # the second has the first name
    reason = " ".join(line.strip() for line in lines).rstrip(".:,")
    if reason.startswith("Model type") or "custom module" in reason:
        kind = read_config(path)["model_type"]
        what = f"{path} is of architecture {kind!r}, which mlx-lm does not support"
        is_encoder = any(name in str(kind) for name in ENCODERS)
        return UnsupportedModel(f"{what}{ELSE_EMBED if is_encoder else '.'}")
    return BadModelFile(f"{path} is not a complete model ({type(error).__name__}: {reason}).")


def _read_tokenizer(directory: Path, config: dict[str, Any], source: Path) -> Any:
    """Custom code of the tokenizer is never run, and the user is not asked to allow it."""
    # Keepwarm refuses prompts that are too long; the tokenizer's warning is turned off.
    options: dict[str, Any] = {"trust_remote_code": False, "model_max_length": sys.maxsize}
    if is_vision_language(config):
        options |= {"config": _plain_config(directory)}
    end = config.get("eos_token_id")  # of generation_config.json, if that has one
    try:
        ends = end if isinstance(end, list) else [end or 0]
        if not all(isinstance(token, int) for token in ends):
            raise ValueError(f"eos_token_id is {end!r}, no number")
        tokenizer = load_tokenizer(directory, options, eos_token_ids=end)
        if tokenizer.has_chat_template or not (template := _processor_template(directory)):
            return tokenizer
        return load_tokenizer(directory, options | {"chat_template": template}, eos_token_ids=end)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(":")
        what = "config.json" if _is_of_config(directory, error) else "tokenizer"
        raise BadModelFile(
            f"The {what} of {source} cannot be read ({reason}); download it again."
        ) from error


def _plain_config(directory: Path) -> PreTrainedConfig | None:
    """One for a tokenizer whose model has fields that transformers refuses, as Llama 4 has."""
    try:
        AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except StrictDataclassError:
        return PreTrainedConfig()
    except Exception:  # as the tokenizer's own reader meets it
        return None
    return None


def _processor_template(directory: Path) -> str:
    file = directory / PROCESSOR_TEMPLATE
    return str(json.loads(file.read_text())["chat_template"]) if file.is_file() else ""


def _is_of_config(directory: Path, error: Exception) -> bool:
    """Whether the tokenizer was not reached: transformers reads the model's config before it."""
    try:
        AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as found:
        return str(found) == str(error)
    return False


def _set_compute_dtype(module: Any) -> None:
    """On CPU all weights become fp32, where MLX is 10 to 40 times faster; on GPU unchanged."""
    if mx.default_device() == mx.gpu:
        return
    module.set_dtype(mx.float32)  # scales too: dequantising in fp16 would round
    dequantize_model(module)
    module.set_dtype(mx.float32)


# Types of models whose restored prompts were shown to give a cold run's numbers: `exact.json` has
# those that the table of architectures calls exact, by dtype. Any other may drift: rounding depends
# on where a prompt is cut into slices, also in plain mlx-lm.

EXACT = Path(__file__).with_name("exact.json")
IN_16_BITS = {mx.bfloat16, mx.float16}


def may_drift(module: Any, dtypes: set[mx.Dtype]) -> bool:
    """Whether the table does not call this type exact in the dtypes of its caches; it has one
    column for 16 bits, of bfloat16, which rounds more.
    """
    kind = str(getattr(module, "model_type", ""))
    column = "bfloat16" if dtypes & IN_16_BITS else "float32"
    return MODEL_REMAPPING.get(kind, kind) not in json.loads(EXACT.read_text())[column]
