"""Read a checkpoint's configuration and the headers of its weights.

Every error names the file. `read_config`, `parse_config` and `check_generation_config` also take a
GGUF file as `folder`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models.gguf.config import config_values, generation_values
from foretoken.models.gguf.reader import is_gguf, read_gguf
from foretoken.models.sizes import check_sizes, config_file

TOKENIZER_JSON = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
TOKENIZER_TEXT = ("merges.txt", "vocab.txt", "chat_template.jinja")
# Formats for which Transformers needs another package than `tokenizers`.
TOKENIZER_FOREIGN = ("tokenizer.model", "spiece.model", "*.bpe.model", "tekken.json", "*.tiktoken")
TOKENIZER_FILES = (
    *TOKENIZER_JSON, *TOKENIZER_TEXT, *TOKENIZER_FOREIGN, "chat_template.json",
    "additional_chat_templates/*.jinja",
)  # fmt: skip

_WEIGHT_DTYPES = ("F32", "F16", "BF16", "F64")
# The largest known files have 1 MB. With a list of 10**7 layers, a file would have 180 MB.
_MAX_CONFIG_BYTES = 2**24
_MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors format itself


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn errors of the file system and of decoding text in the body of the `with` into a
    `CheckpointError` that names `path`."""
    try:
        yield
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # RuntimeError: no home of `~user`
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"`{path}` cannot be read: {reason}") from error


def has_file(path: Path) -> bool:
    """Whether a file exists. Links are followed.

    Raises:
        CheckpointError: the path is not an ordinary file, or it is a broken link, as an interrupted
            download leaves it in the hub's cache.
    """
    with reading(path):
        if path.is_file():
            return True
        if path.exists():
            raise CheckpointError(f"`{path}` is not a file.")
        if path.is_symlink():
            raise CheckpointError(
                f"`{path}` is a link to `{path.readlink()}`, which is not there: a part of the "
                "checkpoint is missing. Download the checkpoint again."
            )
    return False


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence Transformers' logs, bars and warnings in the body of the `with`."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's `config.json`, or the equal values made from a GGUF file.

    Raises:
        CheckpointError: the file is missing, is not a JSON object, or has no `model_type`.
        UnsupportedModelError: the folder holds an adapter; or see `config_values`.
    """
    if is_gguf(folder):
        return config_values(read_gguf(folder))
    check_no_adapter(folder)
    path = folder / "config.json"
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"`{path}` has no `model_type`: it is not a model configuration.")
    return config


def parse_config(folder: Path, model_type: str, values: dict[str, Any] | None = None) -> Any:
    """Transformers' configuration object (`PretrainedConfig`) of a model folder.

    Args:
        values: the values to parse; None: what `read_config` returns.

    Raises:
        CheckpointError: a value is not valid for `model_type`, or is a size that this machine
            cannot hold.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if values is None and is_gguf(folder):
        values = read_config(folder)
    check_sizes(folder, read_json(folder / "config.json") if values is None else values, None)
    try:
        if values is not None:
            return CONFIG_MAPPING[model_type].from_dict(values)
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(
            f"`{config_file(folder)}` is not a valid `{model_type}` configuration: "
            f"{first_line(error)}"
        ) from error


def check_generation_config(folder: Path) -> None:
    """Raise `CheckpointError` if `generation_config.json` exists and is not valid, or if a GGUF
    file's ids of special tokens are not valid. These values say which tokens end a text."""
    from transformers import GenerationConfig

    path = folder / "generation_config.json"
    if is_gguf(folder):
        generation_values(read_gguf(folder))
        return
    if not has_file(path):
        return
    content = read_json(path)
    stated = content.get("eos_token_id")
    eos_ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if any(type(token) is not int for token in eos_ids):
        raise CheckpointError(
            f"`{path}` gives `eos_token_id` as {stated!r}: it must be a token id or a list of ids."
        )
    try:
        GenerationConfig.from_dict(content)
    except Exception as error:
        raise CheckpointError(
            f"`{path}` is not a valid generation configuration: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of a library's error, at most 200 characters; with the second line if the
    first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__
    return text[:200]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; `CheckpointError` if the file cannot be read, holds no JSON
    object, or is a `config.json` of more than 16 MiB."""
    if not has_file(path):
        raise CheckpointError(
            f"`{path}` is missing: is `{path.parent}` a model folder? A model folder has "
            "`config.json`, or a GGUF file."
        )
    try:
        with reading(path):
            size = path.stat().st_size
            if path.name == "config.json" and size > _MAX_CONFIG_BYTES:
                raise CheckpointError(f"`{path}` has {size} bytes: at most {_MAX_CONFIG_BYTES}.")
            content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"`{path}` is not valid JSON: {error.msg} at line {error.lineno}."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` must hold a JSON object.")
    return content


def check_no_adapter(folder: Path) -> None:
    """Raise `UnsupportedModelError` if the folder holds a LoRA adapter, because Transformers might
    apply it silently."""
    path = folder / "adapter_config.json"
    if not has_file(path):
        return
    adapter = read_json(path)
    kind, base = adapter.get("peft_type", "of no type"), adapter.get("base_model_name_or_path")
    raise UnsupportedModelError(
        f"`{folder}` holds an adapter (`adapter_config.json`: {kind}, for `{base}`), which is not "
        "supported. Merge it into its model's weights once, where `peft` is installed: "
        "`merge_and_unload().save_pretrained(folder)`."
    )


def check_weights(folder: Path, *, plain: bool = True) -> dict[Path, dict[str, Any]]:
    """Check that the folder's safetensors files are complete and hold plain numbers.

    Only headers are read (0.3 ms for the embedded model). Without this check a truncated download
    would cause an obscure error inside a loader.

    Args:
        plain: False accepts weights of any type, for callers that can interpret them.

    Returns:
        The header of each file, by path.

    Raises:
        CheckpointError: there are no safetensors, or a file is missing, corrupt or truncated.
        UnsupportedModelError: weights have a type that means nothing without scales.
    """
    single, index_path = folder / "model.safetensors", folder / "model.safetensors.index.json"
    with reading(folder):
        files = sorted(path.name for path in folder.iterdir() if path.is_file())
    if single.name in files:
        return {single: _read_header(single, plain)}
    if index_path.name not in files and not has_file(single) and not has_file(index_path):
        pickled = [name for name in files if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        if pickled:
            raise CheckpointError(
                f"`{folder}` holds only pickled weights (`{pickled[0]}`), which can run code when "
                "read. Convert them to safetensors, for example by `save_pretrained`."
            )
        raise CheckpointError(f"`{folder}` holds no `model.safetensors` and no index of shards.")
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"`{index_path}` has no `weight_map`.")
    shards: dict[str, set[str]] = {}  # names of tensors by shard
    for tensor, shard in weight_map.items():
        shards.setdefault(str(shard), set()).add(tensor)
    for shard in shards:
        if Path(shard).is_absolute() or ".." in Path(shard).parts or not Path(shard).name:
            raise CheckpointError(f"`{index_path}` names {shard!r}: not a file in the same folder.")
    with reading(index_path):
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing and not has_file(folder / missing[0]):
        raise CheckpointError(
            f"`{folder}` lacks {len(missing)} of {len(shards)} weight files: `{missing[0]}` is "
            "named in the index but is not there. Download the model again."
        )
    headers = {folder / shard: _read_header(folder / shard, plain) for shard in shards}
    for path, tensors in zip(headers, shards.values(), strict=True):
        absent = sorted(tensors - headers[path].keys())
        if absent:
            raise CheckpointError(f"`{path}` lacks the tensor `{absent[0]}`.")
    return headers


def check_plain(path: Path, header: dict[str, Any]) -> None:
    """Raise `UnsupportedModelError` unless the weights in a file are floating-point numbers.

    Weights of another type would be read as if their scale were 1. Tensors with names that do not
    end in `.weight` may have any type.
    """
    for name, entry in header.items():
        if name.endswith(".weight") and entry.get("dtype") not in _WEIGHT_DTYPES:
            raise UnsupportedModelError(
                f"`{path}` stores `{name}` as {entry.get('dtype')}, and `config.json` has no "
                "`quantization_config` that explains these numbers. Use a checkpoint in bfloat16, "
                "float16 or float32."
            )


def _read_header(path: Path, plain: bool) -> dict[str, Any]:
    """The header of a safetensors file, checked against the file's length and, if `plain`, by
    `check_plain`."""
    with reading(path), path.open("rb") as file:
        size = path.stat().st_size
        first_bytes = file.read(8)
        length = int.from_bytes(first_bytes, "little") if len(first_bytes) == 8 else -1
        if first_bytes.startswith(b"version"):
            raise CheckpointError(f"`{path}` is a Git LFS pointer: run `git lfs pull`.")
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise CheckpointError(f"`{path}` is not a safetensors file ({size} bytes).")
        text = file.read(length)
    if len(text) < length:
        raise CheckpointError(
            f"`{path}` is truncated: expected more than {8 + length} bytes, found {size}. "
            "Download it again."
        )
    try:
        header: dict[str, Any] = json.loads(text)
        expected = 8 + length
        for entry in (value for name, value in header.items() if name != "__metadata__"):
            start, end = map(int, entry["data_offsets"])
            if not isinstance(entry["dtype"], str) or min([start, *map(int, entry["shape"])]) < 0:
                raise ValueError(entry)
            expected = max(expected, 8 + length + end)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"`{path}` has a corrupt header. Download it again.") from error
    if size != expected:
        state = "truncated" if size < expected else "corrupt"
        raise CheckpointError(
            f"`{path}` is {state}: expected {expected} bytes, found {size}. Download it again."
        )
    if plain:
        check_plain(path, header)
    return header
