"""Load a model: from the name of a checkpoint to a `CausalLM` that passed every check.

`families.py` explains what a *stack* and its *twin* are.
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
    FAMILIES, ReadTensor, tensor_reader, fill_stack, miniature_of, read_stack, stays_compressed,
    set_generation_config, twin_of,
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
            and the checkpoint's own dtype on a GPU.
        dummy_seed: if not None, weights are random numbers of this seed, and the folder needs only
            a `config.json`.
        max_model_len: most positions of a request; None: the checkpoint's limit.
        shorten: if `max_model_len` is above the checkpoint's limit, use the limit instead of
            raising an error. This is for draft models, which stop drafting at their limit.
        view: what a drafter will read of the model; None: only its tokens.

    Raises:
        CheckpointError: the checkpoint cannot be read, or contradicts itself.
        UnsupportedModelError: the model can be read, but we would not run it exactly.
        ConfigError: an argument is out of bounds, or does not suit the checkpoint or the device.
        EngineMemoryError: random weights are larger than the device's memory.
    """
    view, device = view or TargetView(), torch.device(device)
    backend = get_backend(backend) if isinstance(backend, str) else backend
    folder, is_dummy = resolve_checkpoint(path_or_name), dummy_seed is not None
    with quiet_transformers():
        checkpoint = _read_checkpoint(folder, is_dummy=is_dummy)
        config, model_class = checkpoint.config, checkpoint.model_class
        torch_dtype = _choose_dtype(dtype, config, device)
        limit = _choose_max_len(max_model_len, config, shorten)
        _check_layers(view.aux_layers, config)
        keeps_format = not is_dummy and has_own_format(folder, config)
        if keeps_format and device.type == "cpu" and not view.module:
            return _load_in_own_format(checkpoint, folder, backend, limit, view)
        if not is_dummy:
            module, stack = _load_weights(checkpoint, folder, torch_dtype, device)
        else:
            text = config.get_text_config()
            check_room(folder, text, checkpoint.shapes, torch_dtype, device)
            module = _dummy_module(model_class, config, torch_dtype, device, dummy_seed or 0)
            stack = _stack_if_fit(module)
        if stack is not None:
            _check_miniature(model_class, config)
        source = None if is_dummy else folder
        return _check_model(module, stack, backend, limit, view, max_model_len or limit, source)


def has_own_format(folder: Path, config: Any) -> bool:
    """Whether weights can be read in the format of their file: GGUF or compressed-tensors."""
    return is_gguf(folder) or stays_compressed(config)


def _open_stored_weights(checkpoint: _Checkpoint, folder: Path, twin: Any) -> StoredWeights:
    """The weights in their file's format. The twin also gets the checkpoint's generation config."""
    if not is_gguf(folder):
        set_generation_config(twin, folder)
        return CompressedWeights(folder, checkpoint.headers, twin)
    from transformers import GenerationConfig

    file = read_gguf(folder)
    twin.generation_config = GenerationConfig(**generation_values(file))
    return GgufWeights(file, twin)


def _load_in_own_format(
    checkpoint: _Checkpoint, folder: Path, backend: Backend, max_model_len: int, view: TargetView
) -> CausalLM:
    """Load a model on a CPU with weights in their file's format.

    No module holds a copy of the weights, so there is no self-check against a module. Instead a
    miniature shows that the configuration was read correctly, and `check_kernels` shows that the
    kernels multiply these formats correctly.
    """
    config, model_class = checkpoint.config, checkpoint.model_class
    twin = twin_of(model_class, config, torch.float32, torch.device("cpu"), ATTENTION_NAME)
    weights = _open_stored_weights(checkpoint, folder, twin)
    try:
        stack = fill_stack(twin, weights)
    except UnfitError as reason:
        raise UnsupportedModelError(f"`{folder}` cannot be run: {reason}.") from reason
    check_finite_stack(folder, stack, blocks=backend.name != "native")
    positions = max(max_model_len, config.max_position_embeddings)
    network = _load_quantised_stack(stack, backend, folder, positions)
    with _one_thread():
        _check_miniature(model_class, config)
        if isinstance(network, RoundStack):
            check_kernels(stack, backend)
    weights.release()
    return CausalLM(
        twin, network, backend=backend, layer_shapes=stack.layer_shapes,
        max_model_len=max_model_len, view=view, stack=stack,
    )  # fmt: skip


def _load_quantised_stack(
    stack: Stack, backend: Backend, folder: Path, positions: int
) -> LoadedStack:
    """Load a stack of quantised weights into the backend's kernels, or, if the kernels lack
    something, into stock operators with weights in float32."""
    try:
        return backend.load_stack(stack, positions, 0)
    except UnfitError as reason:
        num_weights = sum(math.prod(linear.weight.shape) for _, linear in linears(stack))
        message = (
            "The model runs in stock operators, slower, and takes %.1f GiB, as its weights are "
            "turned into float32: %s."
        )
        _log.warning(message, 4 * num_weights / 2**30, reason)
    except CheckpointError:
        check_finite_stack(folder, stack, blocks=True)  # raises an error that names the matrix
        raise
    check_finite_stack(folder, stack, blocks=True)
    return backend.stock_stack(stack)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let PyTorch use one thread in the body of the `with`: on a busy machine small operators take
    a hundred times as long with two threads (1.2 s of a load instead of 0.02)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_plain(path_or_name: str | Path) -> Any:
    """Load Transformers' module of a checkpoint in float32 on the CPU, with eager attention.

    None of our code runs in the module.

    Raises:
        CheckpointError, UnsupportedModelError: as `load_model`, for the same checkpoints: weights
            other than safetensors or GGUF, code that comes with the checkpoint, models that we
            cannot run or that are not causal, numbers that are not finite.
    """
    folder, device = resolve_checkpoint(path_or_name), torch.device("cpu")
    with quiet_transformers():
        checkpoint = _read_checkpoint(folder, is_dummy=False)
        if has_own_format(folder, checkpoint.config):
            module, _ = _load_dequantised(checkpoint, folder, torch.float32, device)
        else:
            module = _load_module(checkpoint, folder, torch.float32, device)
        guards.check_finite(folder, module.named_parameters())
        expected = guards.eager_logits(module, device)
        module.set_attn_implementation("eager")
        guards.check_causal(module, expected)
    return module


def _check_model(
    module: Any,
    stack: Stack | None,
    backend: Backend,
    max_model_len: int,
    view: TargetView,
    positions: int,
    folder: Path | None,
) -> CausalLM:
    """Make the model and run the self-check.

    Args:
        module: the module that runs the model if there is no stack; else the stack's twin.
        positions: the engine's longest context; `max_model_len` of a draft model may be shorter.
        folder: the folder of the weights; None if they are random, and so finite.
    """
    device = module.get_input_embeddings().weight.device
    with observe_linears(module) as linear_calls:
        calls, _ = guards.probe(module, device)
    _drop_towers(module, {id(linear) for linear, _ in linear_calls})
    if folder is not None:
        guards.check_finite(folder, module.named_parameters())
    expected = guards.eager_logits(module, device)
    network: LoadedStack | ModuleNetwork = ModuleNetwork(module, backend)
    if stack is not None:
        _check_windows(stack, calls)
        network = _load_stack(stack, backend, max(positions, module.config.max_position_embeddings))
    model = CausalLM(
        module, network, backend=backend, layer_shapes=[call.shape for call in calls],
        max_model_len=max_model_len, view=view,
    )  # fmt: skip
    if stack is None:
        pack_linears(module, linear_calls, backend)
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
    """Raise `UnsupportedModelError` unless the stack's sliding windows are those of the twin.

    The self-check cannot find a wrong window, because its sequences are shorter than windows.
    """
    stack_windows = [layer.mixer.options.sliding_window for layer in stack.layers]
    twin_windows = [call.sliding_window for call in calls]
    if stack_windows != twin_windows:
        raise UnsupportedModelError(
            f"The layers of the module have sliding windows of {twin_windows}, but those of the "
            f"stack were read with {stack_windows}."
        )


def _load_stack(stack: Stack, backend: Backend, positions: int) -> LoadedStack:
    try:
        return backend.load_stack(stack, positions, 0)
    except UnfitError as reason:
        _log.info("The model runs in stock operators: %s", reason)
        return backend.stock_stack(stack)


_checked_miniatures: set[tuple[str, str]] = set()
"""The class and the configuration of each miniature that passed the self-check."""


def _check_miniature(model_class: Any, config: Any) -> None:
    """Raise `UnsupportedModelError` if a miniature of this configuration fails the self-check.

    The miniature (see `miniature_of`) runs as a stack and is compared with its module's eager
    attention. This shows that `families.py` reads the configuration correctly. The check takes 0.1
    s, once per configuration.
    """
    key = model_class.__name__, config.to_json_string(use_diff=False)
    if key in _checked_miniatures:
        return
    module, backend = miniature_of(model_class, config, ATTENTION_NAME), get_backend("torch")
    expected, stack = guards.eager_logits(module, torch.device("cpu")), read_stack(module)
    model = CausalLM(
        module, backend.stock_stack(stack), backend=backend, layer_shapes=stack.layer_shapes,
        max_model_len=guards.MOST_POSITIONS, view=TargetView(),
    )  # fmt: skip
    try:
        guards.self_check(model, expected)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"A small model of this configuration fails: {error}"
        ) from error
    _checked_miniatures.add(key)


def _drop_towers(module: Any, used_linear_ids: set[int]) -> None:
    """Free the submodules of a multimodal model that read pictures or sound.

    Args:
        used_linear_ids: `id` of each linear layer that ran on a text. A submodule is freed if it
            has linear layers and none of them ran.
    """
    if module.config.get_text_config() is module.config:
        return
    for name, child in list(module.base_model.named_children()):
        linear_ids = {id(layer) for layer in child.modules() if type(layer) is torch.nn.Linear}
        if linear_ids and not linear_ids & used_linear_ids:
            setattr(module.base_model, name, None)
            _log.info("`%s`: `%s` is freed: prompts are text.", module.config.model_type, name)


class _Checkpoint(NamedTuple):
    """A checkpoint as far as it is known before its weights are read.

    config, model_class: Transformers' configuration and class
    headers: of the safetensors files, by path; empty for random weights and for a GGUF file
    shapes: of the parameters of `model_class`; None if the class cannot be built
    """

    config: Any
    model_class: Any
    headers: dict[Path, dict[str, Any]]
    shapes: dict[str, tuple[int, ...]] | None


def _read_checkpoint(folder: Path, *, is_dummy: bool) -> _Checkpoint:
    """Read everything except the weights, and compare the configuration with the weights' headers.
    Weights that will be random (`is_dummy`) have no headers."""
    check_generation_config(folder)
    config, model_class, headers = _config_and_class(folder, read_config(folder), is_dummy=is_dummy)
    register_attention()
    shapes = parameter_shapes(model_class, config)
    if not is_dummy and not is_gguf(folder):
        check_numbers(folder, config.get_text_config(), shapes, stored_sizes(headers.values()))
    return _Checkpoint(config, model_class, headers, shapes)


def _config_and_class(
    folder: Path, raw: dict[str, Any], *, is_dummy: bool
) -> tuple[Any, Any, dict[Path, dict[str, Any]]]:
    """Run the checks that do not run the model; `raw` is the content of `config.json`.

    Returns the first three fields of `_Checkpoint`.
    """
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
        bound = "`auto` for a GGUF file: random weights would not have this format"
        raise ConfigError("load_format", "dummy", bound)
    if not guards.check_quantisation(config):
        for path, header in headers.items():
            check_plain(path, header)
    elif is_dummy:
        bound = "`auto` for this checkpoint: random weights would not be quantised"
        raise ConfigError("load_format", "dummy", bound)
    return config, model_class, headers


def _load_weights(
    checkpoint: _Checkpoint, folder: Path, dtype: torch.dtype, device: torch.device
) -> tuple[Any, Stack | None]:
    """A module with the checkpoint's weights, and a stack of these weights (None if no stack can
    run the model).

    For families that backends run themselves, the weights are read into a stack, and the module is
    the stack's twin. Transformers' loader loads all other families and quantised weights, and also
    checkpoints with tensors that do not fit the model, because its errors name these tensors.
    """
    config, model_class, headers, shapes = checkpoint
    if has_own_format(folder, config):
        return _load_dequantised(checkpoint, folder, dtype, device)
    is_quantised = bool(getattr(config, "quantization_config", None))
    if shapes is not None and not is_quantised and config.model_type in FAMILIES:
        twin = twin_of(model_class, config, dtype, device, ATTENTION_NAME)
        read = tensor_reader(twin, headers)
        if read is not None and (stack := _stack_if_fit(twin, read)) is not None:
            set_generation_config(twin, folder)
            return twin, stack
    module = _load_module(checkpoint, folder, dtype, device)
    return module, None if getattr(module, "is_quantized", False) else _stack_if_fit(module)


def _load_dequantised(
    checkpoint: _Checkpoint, folder: Path, dtype: torch.dtype, device: torch.device
) -> tuple[Any, Stack]:
    """A module and its stack, with weights of GGUF or compressed-tensors decoded to plain numbers,
    for modules and kernels that need plain numbers."""
    config, model_class, _, _ = checkpoint
    twin = twin_of(model_class, config, dtype, device, ATTENTION_NAME)
    weights = _open_stored_weights(checkpoint, folder, twin)
    try:
        stack = read_stack(twin, weights.numbers)
    except UnfitError as reason:
        raise UnsupportedModelError(f"`{folder}` cannot be run: {reason}.") from reason
    weights.release()
    return twin, stack


def _stack_if_fit(module: Any, read: ReadTensor | None = None) -> Stack | None:
    try:
        return read_stack(module, read)
    except UnfitError as reason:
        _log.info("`%s` runs through its Transformers module: %s", module.config.model_type, reason)
        return None


def _load_module(
    checkpoint: _Checkpoint, folder: Path, dtype: torch.dtype, device: torch.device
) -> Any:
    """A module with the checkpoint's weights, loaded by Transformers."""
    config, model_class = checkpoint.config, checkpoint.model_class
    # Quantised layers choose their kernels by the device on which they are loaded.
    quantisation = getattr(config, "quantization_config", None) or {"dequantize": True}
    loads_on_device = device.type != "cpu" and not quantisation.get("dequantize")
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
            device_map=device if loads_on_device else None,
        )
    except Exception as error:
        raise CheckpointError(
            f"The weights in `{folder}` do not fit `{model_class.__name__}`: {first_line(error)}"
        ) from error
    # Entries of `mismatched_keys` are (name, stored shape, the module's shape).
    mismatched = sorted(key[0] for key in info["mismatched_keys"])
    check_fit(folder, {"missing": sorted(info["missing_keys"]), "mismatched": mismatched})
    check_leftovers(module, info["unexpected_keys"], folder)
    module = module if loads_on_device else module.to(device)
    return module.eval().requires_grad_(False)


def _dummy_module(
    model_class: Any, config: Any, dtype: torch.dtype, device: torch.device, seed: int
) -> Any:
    """A module with the family's own random initialisation, from a seed. Global random state does
    not change.

    The initialisation alone gives nearly flat logits (standard deviation 0.3 at hidden size 256),
    so that every argmax would be a near-tie. So the output layer is scaled until the logits'
    standard deviation is 2. This also scales a tied input embedding, but the first norm undoes it.
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


def _choose_dtype(option: str, config: Any, device: torch.device) -> torch.dtype:
    """The dtype that the option `dtype` means for this checkpoint and device."""
    check_choice("dtype", option, DTYPES)
    name = option
    if name == "auto":
        stored = str(config.get_text_config().dtype).removeprefix("torch.")
        on_gpu = stored if stored in DTYPES else "bfloat16"
        name = "float32" if device.type == "cpu" else on_gpu
    dtype: torch.dtype = getattr(torch, name)
    check_dtype(option, dtype, device)
    return dtype


def check_dtype(option: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `ConfigError` for bfloat16 on a GPU that does not compute with it.

    Args:
        option: the value of the option `dtype`, for the message.
    """
    if dtype is not torch.bfloat16 or device.type == "cpu" or torch.version.hip is not None:
        return
    if torch.cuda.get_device_capability(device) < (8, 0):
        meaning = "It means the checkpoint's dtype, bfloat16. " if option == "auto" else ""
        bound = f"float16 or float32 on {described_gpu(device)}"
        remedy = f"{meaning}bfloat16 needs compute capability 8.0 or more."
        raise ConfigError("dtype", option, bound, remedy)


def described_gpu(device: torch.device) -> str:
    """A GPU's name, with its compute capability."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


def _check_layers(aux_layers: tuple[int, ...], config: Any) -> None:
    """Raise `ConfigError` for a hidden state that the model does not have."""
    layers = config.get_text_config().num_hidden_layers
    if not all(0 <= layer <= layers for layer in aux_layers):
        bound = f"in 0..{layers}: i is the input of layer i, {layers} the output of the last layer"
        raise ConfigError("aux_layers", aux_layers, bound)


def _choose_max_len(max_len: int | None, config: Any, shorten: bool) -> int:
    """The largest number of positions of a request; `max_len` and `shorten` as in `load_model`."""
    stated = (getattr(config.get_text_config(), name, None) for name in POSITIONS)
    limit: int | None = next((int(positions) for positions in stated if positions), None)
    if max_len is None:
        max_len = limit
    elif shorten and limit is not None:
        max_len = min(max_len, limit)
    if max_len is None:
        raise ConfigError("max_model_len", None, "set: the checkpoint states no limit")
    if not 1 <= max_len <= (limit or max_len):
        bound = f"in 1..{limit}, the positions of the checkpoint"
        raise ConfigError("max_model_len", max_len, bound)
    rope_limit, kind = guards.rope_limit(config) or (max_len, "")
    if max_len <= rope_limit or shorten:
        return min(max_len, rope_limit)
    raise ConfigError(
        "max_model_len",
        max_len,
        f"at most {rope_limit}: in longer contexts RoPE of type `{kind}` depends on the longest "
        "request of the batch, so that requests would change each other's text",
        f"Set `max_model_len` to at most {rope_limit}.",
    )
