"""Load a checkpoint's tokenizer, with errors that name the file at fault."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretoken.errors import CheckpointError, ForetokenError
from foretoken.models.gguf.reader import is_gguf, read_gguf
from foretoken.models.gguf.tokenizer import build_tokenizer
from foretoken.models.locate import resolve_checkpoint
from foretoken.models.sizes import check_sizes

from foretoken.models.checkpoint import (  # isort: skip
    TOKENIZER_FOREIGN, TOKENIZER_JSON, TOKENIZER_TEXT, first_line, has_file, parse_config,
    quiet_transformers, read_config, read_json, reading,
)  # fmt: skip

_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
# A folder with one of these has a tokenizer.
_MAIN_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", *TOKENIZER_FOREIGN,
)  # fmt: skip
_SIDE_FILES = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip

_CONTEXT = 8  # tokens before a text that are encoded or decoded together with it


def decode_after(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text of the tokens `ids` after the tokens `before`. The tokens `ids` are decoded alone
    only if they change the text of `before`, because alone they might lose their first space."""
    context = before[-_CONTEXT:]
    context_text, whole_text = (
        str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        for tokens in (context, [*context, *ids])
    )
    if whole_text.startswith(context_text):
        return whole_text[len(context_text) :]
    return decode_after(tokenizer, [], ids)


def encode_after(tokenizer: Any, before: Sequence[int], text: str) -> list[int]:
    """The token ids of a text after the tokens `before`, which stay as they are. The text
    is encoded alone only if the tokens `before` would change, because alone it might get a space in
    front."""
    context = tokenizer.decode(before[-_CONTEXT:])
    context_ids, whole_ids = (
        list(tokenizer.encode(part, add_special_tokens=False)) for part in (context, context + text)
    )
    if whole_ids[: len(context_ids)] == context_ids:
        return whole_ids[len(context_ids) :]
    return list(tokenizer.encode(text, add_special_tokens=False))


def load_tokenizer(path_or_name: str | Path) -> Any:
    """The checkpoint's tokenizer (`PreTrainedTokenizerBase`); None if there is no tokenizer.

    Raises:
        CheckpointError: there is no such checkpoint, or the checkpoint's files cannot be read or
            make no tokenizer.
        UnsupportedModelError: see `build_tokenizer`, for a GGUF file.
    """
    folder = resolve_checkpoint(path_or_name)
    if is_gguf(folder):
        return _without_warning(_load_gguf_tokenizer(folder))
    if not (_find(folder, _MAIN_FILES[:1]) or _find(folder, _MAIN_FILES)):
        return None
    if has_file(folder / "config.json"):  # Transformers may read it for the tokenizer, too
        check_sizes(folder, read_json(folder / "config.json"), None)
    _find(folder, _SIDE_FILES)  # raises for broken links, which Transformers silently ignores
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        _check_config(folder)
        _check_readable(folder)
        raise CheckpointError(_explain(folder, first_line(error))) from error
    return _without_warning(tokenizer)


def _load_gguf_tokenizer(path: Path) -> Any | None:
    try:
        with quiet_transformers():
            return build_tokenizer(read_gguf(path))
    except ForetokenError:
        raise
    except Exception as error:
        raise CheckpointError(f"`{path}` has no valid tokenizer: {first_line(error)}") from error


def _without_warning(tokenizer: Any | None) -> Any | None:
    """The same tokenizer, without Transformers' warning for texts longer than `model_max_length`.
    The engine refuses prompts that are too long with a more precise error."""
    if tokenizer is not None:
        tokenizer.deprecation_warnings[_TOO_LONG] = True
    return tokenizer


def _find(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    """Names of the folder's files that match, in the order of the patterns; `CheckpointError` if
    the folder cannot be read, or for one of these files as in `has_file`."""
    with reading(folder):  # `glob` would treat an unreadable folder as empty
        names = sorted(path.name for path in folder.iterdir())
    matches = (name for pattern in patterns for name in fnmatch.filter(names, pattern))
    return [name for name in matches if has_file(folder / name)]


def _check_config(folder: Path) -> None:
    """Raise `CheckpointError` for an invalid `config.json`, which Transformers reads, too."""
    from transformers import CONFIG_MAPPING

    if has_file(folder / "config.json"):
        model_type = read_config(folder)["model_type"]
        if model_type in CONFIG_MAPPING:
            parse_config(folder, model_type)


def _check_readable(folder: Path) -> None:
    """Raise `CheckpointError` for a tokenizer file that is not valid JSON, or not UTF-8 text."""
    for name in _find(folder, TOKENIZER_JSON):
        read_json(folder / name)
    for name in _find(folder, TOKENIZER_TEXT):
        with reading(folder / name):
            (folder / name).read_text(encoding="utf-8")


def _explain(folder: Path, reason: str) -> str:
    """An error text: why a folder's files make no tokenizer, although all of them can be read."""
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and read_json(settings).get("auto_map"):
        return (
            f"`{settings}` names a tokenizer of the checkpoint's own code (`auto_map`), which is "
            "never run. Add a `tokenizer.json` to the folder, or use another checkpoint."
        )
    if (folder / "tokenizer.json").is_file():
        return f"`{folder / 'tokenizer.json'}` cannot be loaded: {reason}"
    foreign = _find(folder, TOKENIZER_FOREIGN)
    if foreign:
        return (
            f"`{folder / foreign[0]}` alone makes no tokenizer here: Transformers needs a further "
            "package to read it. Where that package is installed, `AutoTokenizer."
            "from_pretrained(folder).save_pretrained(folder)` writes `tokenizer.json`."
        )
    names = ", ".join(f"`{name}`" for name in _find(folder, (*TOKENIZER_JSON, *TOKENIZER_TEXT)))
    return f"`{folder}` has {names}, which make no tokenizer: add `tokenizer.json`."
