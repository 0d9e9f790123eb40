"""Reading a model folder: where it is, its configuration, and whether its weights are whole.

Belongs here: paths, JSON, safetensors headers; every failure is a `CheckpointError` that names
the file. Does not: building modules (`loader.py`), judging architectures (`guards.py`). No torch.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretoken.errors import CheckpointError, UnsupportedModelError

__all__ = [
    "BUILT_IN",
    "check_weights",
    "first_line",
    "parse_config",
    "read_config",
    "read_json",
    "reading",
    "resolve_checkpoint",
]

BUILT_IN = ("tiny-python", "tiny-python-draft")
"""Checkpoints that come with the package, under `foretoken/assets`."""

_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_WEIGHT_DTYPES = ("F32", "F16", "BF16", "F64")
_MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors format itself


def resolve_checkpoint(name: str | Path) -> Path:
    """Find a model folder: a built-in name, a folder, or a hub id in the local cache.

    Nothing is ever downloaded: a run that needs the network should say so in its own command.

    Raises:
        CheckpointError: nothing of that name; the message lists what was tried and the remedy.
    """
    text = str(name)
    if text in BUILT_IN:
        folder = _ASSETS / text
        if not folder.is_dir():
            raise CheckpointError(
                f"The built-in model `{text}` is missing from this installation: no folder "
                f"`{folder}`. Reinstall Foretoken."
            )
        return folder
    with reading(text[:200]):
        path = Path(text).expanduser()
        if text and path.is_dir():
            return path
        if path.is_file():
            raise CheckpointError(f"`{text}` is a file: give the folder that holds `config.json`.")
    cached = _cached_snapshot(text)
    if cached is not None:
        return cached
    tried = f"built-in models ({', '.join(BUILT_IN)}), a folder of that name"
    near = difflib.get_close_matches(text, BUILT_IN, n=1, cutoff=0.6)
    if near:
        remedy = f"Did you mean `{near[0]}`?"
    elif _looks_like_hub_id(text):
        tried += ", the local Hugging Face cache (nothing is ever downloaded here)"
        remedy = (
            f"With a network, `hf download {text}` puts it there; without one, copy the folder "
            "from a machine that has it and give its path."
        )
    else:
        remedy = "Give a folder that holds `config.json` and safetensors weights."
    raise CheckpointError(f"No model `{text}`. Tried {tried}. {remedy}")


@contextmanager
def reading(what: str | Path) -> Iterator[None]:
    """Failures of the file system, permissions above all, as `CheckpointError`."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: `~nobody` has no home
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"`{what}` cannot be read: {reason}") from error


def _looks_like_hub_id(text: str) -> bool:
    return text.count("/") == 1 and not text.startswith((".", "/", "~"))


def _cached_snapshot(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, HFValidationError):
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.json` of a model folder.

    Raises:
        CheckpointError: no such file, not JSON, not an object, or without `model_type`.
    """
    path = folder / "config.json"
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"`{path}` has no `model_type`: it is not a model configuration.")
    return config


def parse_config(folder: Path, model_type: str) -> Any:
    """Transformers' configuration object (`PretrainedConfig`) of a model folder.

    Raises:
        CheckpointError: a value in `config.json` is not what its `model_type` takes.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(
            f"`{folder / 'config.json'}` is not a valid `{model_type}` configuration: "
            f"{first_line(error)}"
        ) from error


def first_line(error: Exception) -> str:
    """What a library's error says, short enough for a message of ours."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; `CheckpointError` naming the file if there is none."""
    try:
        with reading(path):
            if not path.exists():
                raise CheckpointError(f"`{path}` is missing: is `{path.parent}` a model folder?")
            content = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"`{path}` is not valid JSON: {error.msg} at line {error.lineno}."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` must hold a JSON object.")
    return content


def check_weights(folder: Path) -> None:
    """Check that the folder's safetensors files are all there, whole, and hold plain numbers.

    Reads headers only (0.3 ms for the embedded model), so that a truncated download is reported
    by name and size, before a loader fails somewhere inside.

    Raises:
        CheckpointError: no safetensors, a missing shard, a corrupt or truncated file.
        UnsupportedModelError: weights in a type that only means something with its scales.
    """
    with reading(folder):
        _check_weights(folder)


def _check_weights(folder: Path) -> None:
    index_path = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        _check_dtypes(folder / "model.safetensors")
        return
    if not index_path.is_file():
        others = sorted(
            p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".ckpt"}
        )
        if others:
            raise CheckpointError(
                f"`{folder}` holds only pickled weights (`{others[0]}`), which can run code when "
                "read. Convert them to safetensors (`save_pretrained` writes it)."
            )
        raise CheckpointError(f"`{folder}` holds no `model.safetensors` and no index of shards.")
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"`{index_path}` has no `weight_map`.")
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        shards.setdefault(str(shard), set()).add(tensor)
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        raise CheckpointError(
            f"`{folder}` lacks {len(missing)} of {len(shards)} weight files: `{missing[0]}` is "
            "named in the index but is not there. Download the model again."
        )
    for shard, wanted in shards.items():
        absent = sorted(wanted - _check_dtypes(folder / shard).keys())
        if absent:
            raise CheckpointError(f"`{folder / shard}` lacks the tensor `{absent[0]}`.")


def _check_dtypes(path: Path) -> dict[str, Any]:
    """The header of a safetensors file whose weights are ordinary floating-point numbers.

    Others would be read as if their scale were 1. Integers that are no weights are left alone.
    """
    header = _read_header(path)
    for name, entry in header.items():
        if name.endswith(".weight") and entry.get("dtype") not in _WEIGHT_DTYPES:
            raise UnsupportedModelError(
                f"`{path}` stores `{name}` as {entry.get('dtype')}: quantised weights are not "
                "supported. Use a checkpoint in bfloat16, float16 or float32."
            )
    return header


def _read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, after checking that its length is the file's."""
    with reading(path), path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(8)
        length = int.from_bytes(start, "little") if len(start) == 8 else -1
        if start.startswith(b"version"):
            raise CheckpointError(f"`{path}` is a Git LFS pointer, not weights: `git lfs pull`.")
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
        end = max(
            (int(v["data_offsets"][1]) for k, v in header.items() if k != "__metadata__"),
            default=0,
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"`{path}` has a corrupt header. Download it again.") from error
    expected = 8 + length + end
    if size != expected:
        state = "truncated" if size < expected else "corrupt"
        raise CheckpointError(
            f"`{path}` is {state}: expected {expected} bytes, found {size}. Download it again."
        )
    return header
