"""From a name to a model that passed every guard.

Belongs here: the order of loading, and turning Transformers' failures into our errors. Does not:
the checks (`checkpoint.py`, `guards.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foretoken.config import DTYPES, check_choice
from foretoken.errors import CheckpointError, ConfigError, UnsupportedModelError
from foretoken.models import guards
from foretoken.models.attention import ATTENTION_NAME, AttentionCall, register_attention
from foretoken.models.causal_lm import CausalLM, ModuleNetwork, TargetView
from foretoken.models.compressed import CompressedWeights
from foretoken.models.gguf.config import generation_values
from foretoken.models.gguf.reader import is_gguf, read_gguf
from foretoken.models.gguf.weights import GgufWeights
from foretoken.models.kernel_check import check_kernels
from foretoken.models.locate import resolve_checkpoint
from foretoken.models.packing import observe_linears, pack_linears
from foretoken.models.stored import StoredWeights, check_finite_stack
from foretoken.ops import Backend, get_backend
from foretoken.ops.stack import LoadedStack, RoundStack, Stack, UnfitError, linears

from foretoken.models.checkpoint import (  # isort: skip
    check_generation_config, check_plain, check_weights, first_line, parse_config,
    quiet_transformers, read_config,
)  # fmt: skip
from foretoken.models.families import (  # isort: skip
    FAMILIES, Get, files_of, fill_stack, miniature_of, read_stack, stays_compressed,
    take_generation_config, twin_of,
)  # fmt: skip
from foretoken.models.sizes import (  # isort: skip
    POSITIONS, check_fit, check_leftovers, check_numbers, check_room, check_sizes,
    parameter_shapes, stored_sizes,
)  # fmt: skip

_log = logging.getLogger(__name__)

_DUMMY_LOGIT_STD = 2.0


def load_model(
    path_or_name: str | Path,
    *,
    device: str | torch.device,
    dtype: str = "auto",
    backend: Backend | str,
    dummy_seed: int | None = None,
    max_model_len: int | None = None,
    shorten: bool = False,
    view: TargetView | None = None,
) -> CausalLM:
    """Load a checkpoint, as a stack or as a Transformers module with paged attention, and check it.

    Args:
        path_or_name: what `resolve_checkpoint` takes.
        dtype: one of `config.DTYPES`; "auto" is float32 on a CPU, whatever the checkpoint holds,
            and the checkpoint's own dtype elsewhere.
        dummy_seed: if given, weights are random numbers of this seed, and the folder needs only a
            `config.json`.
        max_model_len: most positions of a request; the checkpoint's limit if None.
        shorten: if `max_model_len` is above the checkpoint's limit, use that limit instead of
            raising: for a draft model, which simply stops drafting there.
        view: what a drafter will read of the model; None: only its tokens.

    Raises:
        CheckpointError: the folder cannot be read.
        UnsupportedModelError: it can be read, but we would not run it exactly.
        ConfigError: `dtype`, `max_model_len` or `aux_layers` out of bounds.
    """
    view, device = view or TargetView(), torch.device(device)
    backend = get_backend(backend) if isinstance(backend, str) else backend
    folder, is_dummy = resolve_checkpoint(path_or_name), dummy_seed is not None
    with quiet_transformers():
        described = _description(folder, is_dummy=is_dummy)
        config, model_class = described.config, described.model_class
        torch_dtype = _choose_dtype(dtype, config, device)
        limit = _choose_max_len(max_model_len, config, shorten)
        _check_layers(view.aux_layers, config)
        is_stored = not is_dummy and has_own_format(folder, config)
        if is_stored and device.type == "cpu" and not view.module:
            return _stored_model(described, folder, backend, limit, view)
        if not is_dummy:
            module, stack = _weighted(described, folder, torch_dtype, device)
        else:
            text = config.get_text_config()
            check_room(folder, text, described.shapes, torch_dtype, device)
            module = _dummy_module(model_class, config, torch_dtype, device, dummy_seed or 0)
            stack = _stack_of(module)
        if stack is not None:
            _check_miniature(model_class, config)
        source = None if is_dummy else folder
        return _checked(module, stack, backend, limit, view, max_model_len or limit, source)


def has_own_format(folder: Path, config: Any) -> bool:
    """Whether weights are read in the format of their file: GGUF's, or compressed-tensors'."""
    return is_gguf(folder) or stays_compressed(config)


def _stored(described: _Described, folder: Path, module: Any) -> StoredWeights:
    """Weights in the format of their file, for a twin, which also gets its generation config."""
    if not is_gguf(folder):
        take_generation_config(module, folder)
        return CompressedWeights(folder, described.headers, module)
    from transformers import GenerationConfig

    file = read_gguf(folder)
    module.generation_config = GenerationConfig(**generation_values(file))
    return GgufWeights(file, module)


def _stored_model(
    described: _Described, folder: Path, backend: Backend, max_model_len: int, view: TargetView
) -> CausalLM:
    """A model on a CPU with weights in their file's format, of which no module holds a copy.

    So there is no self-check against a module. A miniature shows that the configuration was read
    correctly, `check_kernels` that the kernels multiply these formats correctly.
    """
    config, model_class = described.config, described.model_class
    module = twin_of(model_class, config, torch.float32, torch.device("cpu"), ATTENTION_NAME)
    weights = _stored(described, folder, module)
    try:
        stack = fill_stack(module, weights)
    except UnfitError as reason:
        raise UnsupportedModelError(f"`{folder}` cannot be run: {reason}.") from reason
    check_finite_stack(folder, stack, blocks=backend.name != "native")
    network = _laid_out(stack, backend, folder, max(max_model_len, config.max_position_embeddings))
    with _one_thread():
        _check_miniature(model_class, config)
        if isinstance(network, RoundStack):
            check_kernels(stack, backend)
    weights.release()
    return CausalLM(
        module, network, backend=backend, layer_shapes=stack.layer_shapes,
        max_model_len=max_model_len, view=view, stack=stack,
    )  # fmt: skip


def _laid_out(stack: Stack, backend: Backend, folder: Path, positions: int) -> LoadedStack:
    """Quantised weights in a backend's layout, or as float32 in stock operators."""
    try:
        return backend.load_stack(stack, positions, 0)
    except UnfitError as reason:
        numbers = [math.prod(linear.weight.shape) for _, linear in linears(stack)]
        _log.warning(
            "The model runs in stock operators, slower, and takes %.1f GiB, as its weights are "
            "turned into float32: %s.",
            4 * sum(numbers) / 2**30,
            reason,
        )
    except CheckpointError:
        check_finite_stack(folder, stack, blocks=True)  # raises an error that names the matrix
        raise
    check_finite_stack(folder, stack, blocks=True)
    return backend.stock_stack(stack)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let PyTorch use one thread inside. On a busy machine small operators take a hundred times as
    long with two (1.2 s of a load instead of 0.02)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_plain(path_or_name: str | Path) -> Any:
    """A checkpoint's own module in float32 on the CPU, under its own eager attention.

    None of our code runs in it. It refuses whatever `load_model` refuses before a pass: weights
    other than safetensors, the checkpoint's own code, families that we cannot run, numbers that are
    not finite.

    Raises:
        CheckpointError, UnsupportedModelError: as `load_model`.
    """
    folder, device = resolve_checkpoint(path_or_name), torch.device("cpu")
    with quiet_transformers():
        described = _description(folder, is_dummy=False)
        if has_own_format(folder, described.config):
            module, _ = _dequantised(described, folder, torch.float32, device)
        else:
            module = _weighted_module(described, folder, torch.float32, device)
        guards.check_finite(folder, module.named_parameters())
        expected = guards.eager_logits(module, device)
        module.set_attn_implementation("eager")
        guards.check_causal(module, expected)
    return module


def _checked(
    module: Any,
    stack: Stack | None,
    backend: Backend,
    max_model_len: int,
    view: TargetView,
    positions: int,
    folder: Path | None,
) -> CausalLM:
    """The model, after the self-check.

    Args:
        module: runs the model if there is no stack; else the stack's twin.
        positions: the engine's longest context; `max_model_len` of a draft model may be shorter.
        folder: the folder of the weights; None: they are random.
    """
    device = module.get_input_embeddings().weight.device
    with observe_linears(module) as linears:
        calls, _ = guards.probe(module, device)
    _drop_towers(module, {id(linear) for linear, _ in linears})
    if folder is not None:
        guards.check_finite(folder, module.named_parameters())
    expected = guards.eager_logits(module, device)
    network: LoadedStack | ModuleNetwork = ModuleNetwork(module, backend)
    if stack is not None:
        _check_windows(stack, calls)
        network = _loaded(stack, backend, max(positions, module.config.max_position_embeddings))
    model = CausalLM(
        module, network, backend=backend, layer_shapes=[call.shape for call in calls],
        max_model_len=max_model_len, view=view,
    )  # fmt: skip
    if stack is None:
        pack_linears(module, linears, backend)
    try:
        guards.self_check(model, expected)
    except UnsupportedModelError as error:
        if not model.runs_in_kernels:
            raise
        raise UnsupportedModelError(
            f"{error} It ran in the kernels of backend `{backend.name}`; "
            '`backend="torch"` runs it in stock operators.'
        ) from error
    return model


def _check_windows(stack: Stack, calls: list[AttentionCall]) -> None:
    """Compare with the twin's windows: the self-check's sequences are shorter than these."""
    own = [layer.mixer.options.sliding_window for layer in stack.layers]
    asked = [call.sliding_window for call in calls]
    if own != asked:
        raise UnsupportedModelError(
            f"Its layers attend with sliding windows of {asked}, and were read with {own}."
        )


def _loaded(stack: Stack, backend: Backend, positions: int) -> LoadedStack:
    """A stack in the backend's layout, or in stock operators if the backend lacks something."""
    try:
        return backend.load_stack(stack, positions, 0)
    except UnfitError as reason:
        _log.info("The model runs in stock operators: %s", reason)
        return backend.stock_stack(stack)


def _miniature_error(model_class: Any, config: Any) -> str:
    """How a family's stack differs from its module in a miniature; empty if it does not."""
    module, backend = miniature_of(model_class, config, ATTENTION_NAME), get_backend("torch")
    expected, stack = guards.eager_logits(module, torch.device("cpu")), read_stack(module)
    model = CausalLM(
        module, backend.stock_stack(stack), backend=backend, layer_shapes=stack.layer_shapes,
        max_model_len=guards.MOST_POSITIONS, view=TargetView(),
    )  # fmt: skip
    try:
        guards.self_check(model, expected)
    except UnsupportedModelError as error:
        return str(error)
    return ""


_miniatures: dict[tuple[str, str], str] = {}
"""Results of `_miniature_error` by class and configuration."""


def _check_miniature(model_class: Any, config: Any) -> None:
    """Refuse a family whose stack differs from its module's eager attention in a miniature.

    It shows that the table of families reads the configuration correctly, with shorter windows and
    larger norms and biases than a checkpoint may have. It takes 0.1 s, once per configuration.
    """
    key = model_class.__name__, config.to_json_string(use_diff=False)
    if key not in _miniatures:
        _miniatures[key] = _miniature_error(model_class, config)
    if error := _miniatures[key]:
        raise UnsupportedModelError(f"A small model of this configuration fails: {error}")


def _drop_towers(module: Any, ran: set[int]) -> None:
    """Free submodules for pictures or sound: none of their linear layers `ran` on a text."""
    if module.config.get_text_config() is module.config:
        return
    for name, child in list(module.base_model.named_children()):
        linears = {id(m) for m in child.modules() if type(m) is torch.nn.Linear}
        if linears and not linears & ran:
            setattr(module.base_model, name, None)
            _log.info("`%s`: `%s` is left out, prompts are text.", module.config.model_type, name)


class _Described(NamedTuple):
    """A checkpoint before its weights are read.

    headers: of its safetensors files
    shapes:  of the parameters of `model_class`; None if it cannot be built
    """

    config: Any
    model_class: Any
    headers: dict[Path, dict[str, Any]]
    shapes: dict[str, tuple[int, ...]] | None


def _description(folder: Path, *, is_dummy: bool) -> _Described:
    """The checkpoint's description, after comparing the configuration with the weights, if any."""
    check_generation_config(folder)
    config, model_class, headers = _config_and_class(folder, read_config(folder), is_dummy=is_dummy)
    register_attention()
    shapes = parameter_shapes(model_class, config)
    if not is_dummy and not is_gguf(folder):
        check_numbers(folder, config.get_text_config(), shapes, stored_sizes(headers.values()))
    return _Described(config, model_class, headers, shapes)


def _config_and_class(
    folder: Path, raw: dict[str, Any], *, is_dummy: bool
) -> tuple[Any, Any, dict[Path, dict[str, Any]]]:
    """The configuration, its class, and the headers of the weights, if any, after the guards that
    do not run the model."""
    from transformers.models.auto import modeling_auto as auto

    model_type = raw["model_type"]
    text_class = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    class_names = [text_class, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(model_type)]
    name = guards.check_config(raw, [name for name in class_names if name])
    headers = {} if is_dummy or is_gguf(folder) else check_weights(folder, plain=False)
    if not is_gguf(folder):  # `read_config` has checked a GGUF file's sizes
        check_sizes(folder, raw, None if is_dummy else stored_sizes(headers.values()))
    config = parse_config(folder, model_type)
    if name == text_class:
        model_class = auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    else:
        model_class = auto.MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
        guards.check_multimodal(config)
    guards.check_class(model_class, config)
    if is_dummy and is_gguf(folder):
        bound = "`auto` for a GGUF file: random weights would be of another kind"
        raise ConfigError("load_format", "dummy", bound)
    if not guards.check_quantisation(config):
        for path, header in headers.items():
            check_plain(path, header)
    elif is_dummy:
        bound = "`auto` for quantised weights: random ones would be of another kind"
        raise ConfigError("load_format", "dummy", bound)
    return config, model_class, headers


def _weighted(
    described: _Described, folder: Path, dtype: torch.dtype, device: torch.device
) -> tuple[Any, Stack | None]:
    """A module with the checkpoint's weights, and its stack, if it has one.

    For families that backends run themselves, the stack is read and the module is its twin. Other
    families, and damaged checkpoints, are left to Transformers' loader.
    """
    config, model_class, headers, shapes = described
    if has_own_format(folder, config):
        return _dequantised(described, folder, dtype, device)
    is_quantised = bool(getattr(config, "quantization_config", None))
    if shapes is not None and not is_quantised and config.model_type in FAMILIES:
        twin = twin_of(model_class, config, dtype, device, ATTENTION_NAME)
        get = files_of(twin, headers)
        if get is not None and (stack := _stack_of(twin, get)) is not None:
            take_generation_config(twin, folder)
            return twin, stack
    module = _weighted_module(described, folder, dtype, device)
    return module, None if getattr(module, "is_quantized", False) else _stack_of(module)


def _dequantised(
    described: _Described, folder: Path, dtype: torch.dtype, device: torch.device
) -> tuple[Any, Stack]:
    """The same with the weights as plain numbers, for a module or for kernels that need them."""
    config, model_class, _, _ = described
    twin = twin_of(model_class, config, dtype, device, ATTENTION_NAME)
    weights = _stored(described, folder, twin)
    try:
        stack = read_stack(twin, weights.numbers)
    except UnfitError as reason:
        raise UnsupportedModelError(f"`{folder}` cannot be run: {reason}.") from reason
    weights.release()
    return twin, stack


def _stack_of(module: Any, get: Get | None = None) -> Stack | None:
    try:
        return read_stack(module, get)
    except UnfitError as reason:
        _log.info("`%s` runs through its Transformers module: %s", module.config.model_type, reason)
        return None


def _weighted_module(
    described: _Described, folder: Path, dtype: torch.dtype, device: torch.device
) -> Any:
    config, model_class = described.config, described.model_class
    # Quantised layers choose their kernels by the device that they are loaded to.
    quantisation = getattr(config, "quantization_config", None) or {"dequantize": True}
    is_placed = device.type != "cpu" and not quantisation.get("dequantize")
    try:
        module, info = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            device_map=device if is_placed else None,
        )
    except Exception as error:
        raise CheckpointError(
            f"The weights in `{folder}` do not fit `{model_class.__name__}`: {first_line(error)}"
        ) from error
    # Entries of `mismatched_keys` are (name, shape stored, shape wanted).
    mismatched = sorted(key[0] for key in info["mismatched_keys"])
    check_fit(folder, {"missing": sorted(info["missing_keys"]), "mismatched": mismatched})
    check_leftovers(module, info["unexpected_keys"], folder)
    module = module if is_placed else module.to(device)
    return module.eval().requires_grad_(False)


def _dummy_module(
    model_class: Any, config: Any, dtype: torch.dtype, device: torch.device, seed: int
) -> Any:
    """A module with the family's own random initialisation, seeded; global random state is kept.

    Its logits would be nearly flat (standard deviation 0.3 at hidden size 256), and every argmax a
    near-tie. So the output embedding is scaled until their standard deviation is 2. A tied input
    embedding is scaled with it, which the first norm undoes.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        module = model_class._from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    module = module.to(device).eval().requires_grad_(False)
    _, logits = guards.probe(module, device)
    head, std = module.get_output_embeddings(), logits.float().std().item()
    if head is not None and 0 < std < _DUMMY_LOGIT_STD:
        head.weight.mul_(_DUMMY_LOGIT_STD / std)
    return module


def _choose_dtype(asked: str, config: Any, device: torch.device) -> torch.dtype:
    check_choice("dtype", asked, DTYPES)
    dtype = asked
    if dtype == "auto":
        stored = str(config.get_text_config().dtype).removeprefix("torch.")
        elsewhere = stored if stored in DTYPES else "bfloat16"
        dtype = "float32" if device.type == "cpu" else elsewhere
    chosen: torch.dtype = getattr(torch, dtype)
    check_dtype(asked, chosen, device)
    return chosen


def check_dtype(asked: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `ConfigError` for bfloat16 on a GPU that does not compute with it."""
    if dtype is not torch.bfloat16 or device.type == "cpu" or torch.version.hip is not None:
        return
    if torch.cuda.get_device_capability(device) < (8, 0):
        meant = "It means bfloat16 here, the checkpoint's. " if asked == "auto" else ""
        bound = f"float16 or float32 on {described_gpu(device)}"
        raise ConfigError("dtype", asked, bound, f"{meant}bfloat16 takes 8.0 or more.")


def described_gpu(device: torch.device) -> str:
    """A GPU's name, with its compute capability."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


def _check_layers(aux_layers: tuple[int, ...], config: Any) -> None:
    layers = config.get_text_config().num_hidden_layers
    if not all(0 <= layer <= layers for layer in aux_layers):
        wanted = f"in 0..{layers}: what enters layer i is i, and {layers} is behind the last"
        raise ConfigError("aux_layers", aux_layers, wanted)


def _choose_max_len(wanted: int | None, config: Any, shorten: bool) -> int:
    stated = (getattr(config.get_text_config(), name, None) for name in POSITIONS)
    limit: int | None = next((int(n) for n in stated if n), None)
    if wanted is None:
        wanted = limit
    elif shorten and limit is not None:
        wanted = min(wanted, limit)
    if wanted is None:
        raise ConfigError("max_model_len", None, "set: the checkpoint does not state its own")
    if not 1 <= wanted <= (limit or wanted):
        bound = f"in 1..{limit}, the positions of the checkpoint"
        raise ConfigError("max_model_len", wanted, bound)
    most, kind = guards.rope_limit(config) or (wanted, "")
    if wanted <= most or shorten:
        return min(wanted, most)
    raise ConfigError(
        "max_model_len",
        wanted,
        f"at most {most}: in longer contexts RoPE of type `{kind}` depends on the longest request "
        "of the batch, so that requests would change each other's text",
        f"Set `max_model_len` to at most {most}.",
    )
