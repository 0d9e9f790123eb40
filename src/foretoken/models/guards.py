"""Which models we refuse, and why: silently wrong output is the one unacceptable failure.

Some families have Transformers' support flag although they attend across packed requests, or never
call the attention function. Only running such a model shows it: see `self_check`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.cache.kv_pool import KVPool
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models.causal_lm import CausalLM
from foretoken.models.checkpoint import first_line
from foretoken.models.families import stays_compressed
from foretoken.ops import AttentionBatch
from foretoken.ops.stack import ForwardOutput, dtype_of
from foretoken.ops.steps import ForwardBatch

from foretoken.models.attention import (  # isort: skip
    ATTENTION_NAME, AttentionCall, AttentionPass, attention_context,
)  # fmt: skip

# Model types that call attention through Transformers' interface, although they lack its support
# flag. They pass the self-check, and the tests compare them with plain Transformers.
_UNFLAGGED = frozenset({"stablelm"})

_ALIBI = "its own code adds ALiBi biases to attention"
_OWN_ATTENTION = "its attention is its own code, out of reach of paged attention"
_RECURRENT = "it keeps a recurrent state, which paged attention does not hold and cannot roll back"
_REASONS = {
    "bart": "it attends to an encoder's output, too",
    "bloom": _ALIBI,
    "codegen": _OWN_ATTENTION,
    "falcon": _OWN_ATTENTION,
    "gpt_neo": _OWN_ATTENTION,
    "gptj": _OWN_ATTENTION,
    "mpt": _ALIBI,
    "rwkv": _RECURRENT,
    "xglm": _OWN_ATTENTION,
}
_LAYER_REASONS = {
    "chunked_attention": "attention in chunks is not a sliding window",
    "conv": _RECURRENT,
    "hybrid": _RECURRENT,
    "linear_attention": _RECURRENT,
}

# Bounds on the difference to eager attention, relative to the largest logit. In float32 the worst
# row counts; correct models stay below 1e-6. In half precision the 85th percentile of rows counts,
# because rounding can send single tokens to another expert of a mixture (0.2 in one row of a
# correct model). Correct models stayed below 2e-2, a bidirectional model was at 0.5.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

MOST_POSITIONS = 64  # an upper bound of positions in the self-check
_LENGTH = 22  # tokens per sequence of the self-check: more than 16, a usual size of cache blocks
BLOCK, NUM_BLOCKS = 4, 16  # the self-check's cache: tokens per block, and blocks


def check_config(raw: dict[str, Any], class_names: list[str]) -> str:
    """The class of `class_names` that `config.json` names; the first if it names no class at all.

    Args:
        raw: the content of `config.json`.
        class_names: Transformers' classes for the `model_type`, at most two: for a causal language
            model, then for a multimodal model.

    Raises:
        CheckpointError: `architectures` is not a list.
        UnsupportedModelError: the checkpoint needs its own code or has another architecture, or
            there are no `class_names`.
    """
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        raise CheckpointError(f"`architectures` in `config.json` is {names!r}: must be a list.")
    known = [name for name in class_names if name in map(str, names)]
    if raw.get("auto_map") and not known:
        raise UnsupportedModelError(
            f"The checkpoint brings its own code (`auto_map`, architecture {names}), which is "
            "never run. Use a checkpoint of an architecture that Transformers itself has."
        )
    if not class_names:
        raise UnsupportedModelError(
            f"Transformers has no causal language model of type `{raw['model_type']}`. If it is "
            "new, a newer Transformers may have it."
        )
    if names and not known and any(str(name).endswith("Eagle3") for name in names):
        raise UnsupportedModelError(
            f"The checkpoint is an EAGLE-3 head ({names}), not a model: name it as `model` of a "
            "`speculative_config` with the method `eagle3`."
        )
    if names and not known:
        raise UnsupportedModelError(
            f"The checkpoint is of architecture {names}: for `{raw['model_type']}` it must be "
            f"`{class_names[0]}`."
        )
    return (known or class_names)[0]


def check_quantisation(config: Any) -> bool:
    """Whether the weights are quantised. If they are, check that they can be loaded.

    If Transformers will load the weights, `config` is changed so that Transformers dequantises
    them where possible. Any backend can then run them as stacks, and no kernels are downloaded.

    Raises:
        UnsupportedModelError: Transformers cannot load these weights on this machine.
    """
    quantization: Any = getattr(config, "quantization_config", None)
    quantization = quantization or getattr(config.get_text_config(), "quantization_config", None)
    if not quantization:
        return False
    if stays_compressed(config):
        return True
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        quantiser = AutoHfQuantizer.from_config(dict(quantization), pre_quantized=True)
        if hasattr(quantiser.quantization_config, "dequantize"):
            quantization["dequantize"] = quantiser.quantization_config.dequantize = True
        quantiser.validate_environment(device_map=None)
    except Exception as error:
        method = quantization.get("quant_method")
        raise UnsupportedModelError(
            f"Quantised weights (`quant_method`: {method}) cannot be loaded here: "
            f"{first_line(error).rstrip('.')}. Or use a checkpoint in bfloat16, float16 or float32."
        ) from error
    return True


def check_class(model_class: Any, config: Any) -> None:
    """Raise `UnsupportedModelError` if the class or the configuration show that paged attention
    cannot run the model."""
    text = config.get_text_config()
    _check_rope_types(text)
    for layer, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in ("full_attention", "sliding_attention"):
            why = _LAYER_REASONS.get(kind, "only full and sliding window attention are supported")
            raise UnsupportedModelError(
                f"Layer {layer} of `{text.model_type}` is of type `{kind}`: {why}."
            )
    if getattr(text, "attn_temperature_tuning", False):
        raise UnsupportedModelError(
            f"`{text.model_type}` scales attention by a token's place in the packed batch, not in "
            "its request (`attn_temperature_tuning`), so that requests would change each other's "
            "text."
        )
    has_flag = getattr(model_class, "_supports_attention_backend", False)
    if not has_flag and config.model_type not in _UNFLAGGED:
        why = _REASONS.get(config.model_type, "its class does not declare that it can")
        raise UnsupportedModelError(
            f"`{config.model_type}` does not support a custom attention backend in Transformers: "
            f"{why}."
        )


def check_multimodal(config: Any) -> None:
    """Raise `UnsupportedModelError` for a multimodal model with a text part that needs an
    encoder."""
    configs = (config, config.get_text_config())
    if any(getattr(part, "is_encoder_decoder", False) for part in configs):
        raise UnsupportedModelError(
            f"`{config.model_type}` is multimodal, and its text part does not run alone: it "
            "attends to an encoder's output, too."
        )


def _check_rope_types(text: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = {"default", getattr(text, "default_rope_type", "default"), *ROPE_INIT_FUNCTIONS}
    for parameters in _rope_parameters(text.to_dict()):
        kind = parameters["rope_type"]
        if kind not in known:
            raise UnsupportedModelError(
                f"`{text.model_type}` asks for RoPE of type `{kind}`; Transformers has "
                f"{', '.join(f'`{name}`' for name in sorted(known))}. If it is new, a newer "
                "Transformers may have it."
            )


def rope_limit(config: Any) -> tuple[int, str] | None:
    """The longest context in which RoPE does not depend on the batch, and the type of RoPE; None
    if RoPE never depends on the batch.

    `longrope` and `dynamic` choose one set of frequencies for the whole packed batch, by the
    batch's highest position, so that one request would change another's logits (measured: by 2.8).
    The choice is always the same while every position is below `original_max_position_embeddings`
    (longrope) or `max_position_embeddings` (dynamic).
    """
    text = config.get_text_config()
    limits: list[tuple[int, str]] = []
    for parameters in _rope_parameters(text.to_dict()):
        kind = str(parameters["rope_type"])
        if kind == "longrope":
            limits.append((int(parameters["original_max_position_embeddings"]), kind))
        elif "dynamic" in kind:
            limits.append((int(text.max_position_embeddings), kind))
    return min(limits, default=None)


def _rope_parameters(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every dict of RoPE parameters in a configuration, also the dicts of single layer types."""
    for value in config.values():
        if isinstance(value, dict):
            if "rope_type" in value:
                yield value
            yield from _rope_parameters(value)


def probe(module: Any, device: torch.device) -> tuple[list[AttentionCall], Tensor]:
    """Run a few tokens without a cache. Returns each layer's attention call, and logits.

    Raises:
        UnsupportedModelError: the layers do not each make exactly one attention call, in order; a
            sliding window differs from the configuration's; or the module fails on packed input,
            or calls attention with arguments that we do not implement.
    """
    text = module.config.get_text_config()
    batch = _pack([(0, _random_tokens(text.vocab_size, BLOCK), [0])], device)
    calls: list[AttentionCall] = []
    try:
        with torch.inference_mode(), attention_context(AttentionPass(batch, calls=calls)):
            output = module(
                input_ids=batch.token_T.unsqueeze(0),
                position_ids=batch.position_T.unsqueeze(0),
                use_cache=False,
            )
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{'' if text is module.config else 'The text part of '}`{module.config.model_type}` "
            f"fails on packed input with explicit positions ({type(error).__name__})."
        ) from error
    layers = text.num_hidden_layers
    if [call.layer for call in calls] != list(range(layers)):
        raise UnsupportedModelError(
            f"`{text.model_type}` makes {len(calls)} attention calls in {layers} layers: paged "
            "attention needs exactly one call in every layer."
        )
    _check_windows(text, [call.sliding_window for call in calls])
    return calls, output.logits.squeeze(0)


def _pack(
    requests: Sequence[tuple[int, list[int], list[int]]], device: torch.device
) -> ForwardBatch:
    """A batch of requests, each (first position, tokens, blocks), with logits of every token."""
    starts, tokens, blocks = zip(*requests, strict=True)
    counts = [len(ids) for ids in tokens]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    columns = -(-max(lengths) // BLOCK)
    table = [[*row[:columns], *[0] * (columns - len(row))] for row in blocks]
    positions = [range(start, end) for start, end in zip(starts, lengths, strict=True)]

    def tensor(numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    starts_B1 = tensor([0, *accumulate(counts)])
    attention = AttentionBatch(starts_B1, tensor(lengths), tensor(table), BLOCK, values_fit=True)
    return ForwardBatch(
        tensor([*chain(*tokens)]), tensor([*chain(*positions)]), tensor(range(sum(counts))),
        attention,
    )  # fmt: skip


def _check_windows(text: Any, windows: list[int | None]) -> None:
    """Raise `UnsupportedModelError` if the sliding window in a layer's attention call is not the
    configuration's. (The self-check's sequences are too short to find this.)"""
    max_len = getattr(text, "max_position_embeddings", None) or math.inf

    def effective(window: int | None) -> int | None:
        return window if window and window < max_len else None  # a longer window has no effect

    stated = effective(getattr(text, "sliding_window", None))
    actual = [effective(window) for window in windows]
    types = getattr(text, "layer_types", None)
    if types is None:
        # Without a type per layer, the family may have a rule by which only some layers have
        # windows. So the calls are trusted, unless a window is stated and no layer has a window.
        is_missing = stated is not None and not any(actual)
        types = ["sliding_attention" if w or is_missing else "full_attention" for w in actual]
    for layer, (kind, window) in enumerate(zip(types, actual, strict=True)):
        expected = stated if kind == "sliding_attention" else None
        if window != expected:
            raise UnsupportedModelError(
                f"Layer {layer} of `{text.model_type}` attends with a sliding window of {window} "
                f"where its configuration says {expected}."
            )


def self_check(model: CausalLM, expected: Tensor) -> float:
    """Compare a model's logits with the logits of the module's own eager attention.

    Three sequences of random tokens run through the paged cache as in an engine, in ragged batches:
    prefill, decode, verify and rollback. Every row of logits must equal the row of a single plain
    eager forward pass. With `probe` and `eager_logits` these are eight passes of a few tokens (0.15
    s for the embedded model on one thread of a busy CPU). Sliding windows longer than 22 tokens are
    not tested.

    Args:
        expected: `eager_logits` of the module before any layer was replaced.

    Returns:
        The error that was compared with the bound.

    Raises:
        UnsupportedModelError: rows differ by more than rounding.
    """
    kv = KVPool(model.layer_shapes, NUM_BLOCKS, BLOCK, dtype=model.dtype, device=model.device)

    def run() -> list[Tensor]:
        forward = model.forward
        return run_schedule(lambda batch: forward(batch, kv), model.vocab_size, model.device)

    model.backend.compile_ahead(run)
    errors = []
    for step, logits in zip(_SCHEDULE, run(), strict=True):
        row = 0
        for i, start, count, drafts in step:
            logits_NV, eager_NV = logits[row : row + count], expected[i, start : start + count]
            errors.append((logits_NV.float() - eager_NV).abs().amax(-1))
            row += count + drafts
    error_N = torch.cat(errors) / expected.abs().max()
    dtype = dtype_of(model.embedding)  # of the module; kernels may compute in a wider dtype
    tolerance = TOLERANCE[dtype]
    error = error_N.quantile(1.0 if dtype is torch.float32 else 0.85).item()
    if not error <= tolerance:  # NaN too
        raise UnsupportedModelError(
            f"`{model.config.model_type}` differs from its own eager attention by {error:.1e} of "
            f"the largest logit (bound {tolerance:.0e}): packed requests would not be exact."
        )
    return error


def run_schedule(
    forward: Callable[[ForwardBatch], ForwardOutput], vocab_size: int, device: torch.device
) -> list[Tensor]:
    """Run the self-check's passes in order. Returns each pass's logits of all rows."""
    tokens, wrong_drafts = _check_tokens(vocab_size), _random_tokens(vocab_size, 3, 4)
    logits = []
    for step in _SCHEDULE:
        requests = [
            (start, tokens[i][start : start + count] + wrong_drafts[:drafts], _BLOCKS[i])
            for i, start, count, drafts in step
        ]
        logits.append(forward(_pack(requests, device)).logits_NV.clone())
    return logits


# The cache blocks of each sequence: mostly adjacent in the first, scattered in the other two.
_BLOCKS = ([1, 2, 3, 4, 13, 14], [9, 5, 7, 6], [15, 10, 12, 8, 11])

# Steps of (sequence, first position, number of true tokens, number of wrong drafts after them).
# A later step overwrites the positions of wrong drafts, as a rollback does.
_SCHEDULE = (
    ((0, 0, 13, 0), (1, 0, 3, 0)),  # ragged prefill
    ((0, 13, 3, 0), (1, 3, 1, 0), (2, 0, 13, 0)),  # chunked prefill, decode, prefill
    ((0, 16, 1, 3), (1, 4, 1, 3), (2, 13, 1, 3)),  # verify with wrong drafts
    ((2, 14, 5, 0), (0, 17, 5, 0), (1, 5, 5, 0)),  # rolled back, verify with right drafts
    ((1, 10, 1, 0), (2, 19, 1, 0)),  # decode
    ((1, 11, 1, 0),),  # decode one request
)


def check_finite(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise `CheckpointError` for the first of a checkpoint's tensors with NaN or infinity.

    The self-check would miss some of these tensors: its few tokens do not read other tokens'
    embeddings or most experts. Reading 1 GB takes 0.3 s on one CPU core.
    """
    for name, tensor in tensors:
        if tensor.dtype not in TOLERANCE or not tensor.numel():
            continue  # quantised, or empty
        if not bool(torch.stack(tensor.aminmax()).isfinite().all()):
            nans, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
            remedy = "The weights are damaged: download them again."
            if tensor.dtype is torch.float16 and not nans:
                remedy = f"{remedy[:-1]}, or try another `dtype`: float16 ends at 65504."
            raise CheckpointError(
                f"`{name}` in `{folder}` is not finite in {tensor.dtype}: of {tensor.numel()} "
                f"numbers {nans} are NaN and {infinite} infinite. {remedy}"
            )


def eager_logits(module: Any, device: torch.device) -> Tensor:
    """The logits that the module itself gives for the self-check's sequences, float32 [3, 22, V].

    Raises `UnsupportedModelError` if eager attention fails or a logit is not finite.
    """
    vocab_size = module.config.get_text_config().vocab_size
    input_ids = torch.tensor(_check_tokens(vocab_size), device=device)
    module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits: Tensor = module(input_ids=input_ids, use_cache=False).logits
    except Exception as error:
        raise UnsupportedModelError(
            f"`{module.config.model_type}` has no working eager attention to check against "
            f"({type(error).__name__})."
        ) from error
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
    if not bool(logits.isfinite().all()):
        raise UnsupportedModelError(
            f"`{module.config.model_type}` gives logits that are not finite in {logits.dtype}, "
            "with Transformers' own attention: the weights are damaged, or too large for this "
            "dtype (float16 ends at 65504). Try another `dtype`."
        )
    return logits.float()


def check_causal(module: Any, expected: Tensor) -> None:
    """Raise `UnsupportedModelError` if later tokens change the logits of earlier tokens.

    The first halves of the self-check's sequences are compared with `expected`, the module's
    `eager_logits` of the whole sequences.
    """
    half = _LENGTH // 2
    ids = torch.tensor(_check_tokens(module.config.get_text_config().vocab_size))[:, :half]
    with torch.inference_mode():
        logits = module(input_ids=ids.to(expected.device), use_cache=False).logits
    error = float((logits.float() - expected[:, :half]).abs().max() / expected.abs().max())
    if not error <= TOLERANCE[logits.dtype]:
        raise UnsupportedModelError(
            f"`{module.config.model_type}` is not causal: later tokens change the logits of "
            f"earlier tokens by {error:.1e} of the largest logit."
        )


def _check_tokens(vocab_size: int) -> list[list[int]]:
    return [_random_tokens(vocab_size, _LENGTH, seed) for seed in (1, 2, 3)]


def _random_tokens(vocab_size: int, count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(vocab_size, (count,), generator=generator).tolist()
    return tokens
