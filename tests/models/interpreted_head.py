"""Cases of the GPU's EAGLE-3 head, in a process of its own with interpreted kernels.

    TRITON_INTERPRET=1 python -m tests.models.interpreted_head [name ...]

runs the cases of these names, or all, and prints one JSON object: case -> None, or what went wrong.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.heads import save_head
from foretoken.cache.kv_pool import KVPool
from foretoken.models.eagle3 import load_head, read_head
from foretoken.models.eagle3_config import read_eagle3_config
from foretoken.ops import AttentionBatch, Backend, LoadedStack, Stack, UnfitError, get_backend
from foretoken.ops.backends.torch.stack import StockStack
from foretoken.ops.backends.triton.decoder import FusedStack
from foretoken.ops.stack import Dense
from tests.models.batches import Span, build_batch
from tests.models.interpreted_decoder import report
from tests.support import interpreter as interpreter

HIDDEN, VOCABULARY, BLOCK, ROWS = 64, 300, 4, 6
CPU = torch.device("cpu")
SWITCHES: dict[str, dict[str, Any]] = {
    "whole vocabulary": {},
    "some of it": {"drafted": 128},
    "normed residual": {"drafted": 128, "norm_before_residual": True, "aux_layers": (0, 3)},
    "other heads": {"num_key_value_heads": 4, "head_dim": 32, "rms_norm_eps": 1e-3},
    "an embedding of its own": {"layout": "model", "target_hidden_size": HIDDEN},
}


def embedding() -> torch.Tensor:
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(9))


def read(folder: Path, **switches: Any) -> Stack:
    save_head(folder, hidden=HIDDEN, vocabulary=VOCABULARY, **switches)
    return read_head(folder, read_eagle3_config(folder), Dense(embedding()))


def load(folder: Path, backend: Backend, **switches: Any) -> LoadedStack:
    save_head(folder, hidden=HIDDEN, vocabulary=VOCABULARY, **switches)
    config = read_eagle3_config(folder)
    return load_head(
        folder, config, embedding=Dense(embedding()), backend=backend, positions=40, most_rows=ROWS
    )


def both(folder: Path, **switches: Any) -> tuple[LoadedStack, LoadedStack]:
    """A head in kernels, and the same one in operators."""
    kernels, operators = get_backend("triton"), get_backend("torch")
    head, plain = load(folder, kernels, **switches), load(folder, operators, **switches)
    assert isinstance(head, FusedStack)
    assert isinstance(plain, StockStack)
    return head, plain


def agrees(folder: Path, switches: dict[str, Any]) -> None:
    """Features, hidden states, logits and K/V of one, five and eight rows; all logits or some."""
    heads = both(folder, **switches)
    generator = torch.Generator().manual_seed(1)
    shapes, num_aux = heads[0].stack.layer_shapes, read_eagle3_config(folder).num_aux
    pools = [KVPool(shapes, 12, BLOCK, dtype=torch.float32, device=CPU) for _ in heads]
    blocks, done = ([1, 4, 7, 3], [5, 2, 9, 8]), [0, 0]
    for new, wanted in (((5, 0), None), ((3, 5), [2, 7]), ((1, 1), None), ((0, 1), None)):
        spans = []
        for i, count in enumerate(new):
            tokens = torch.randint(VOCABULARY, (count,), generator=generator).tolist()
            if count:
                spans.append(Span(blocks[i], done[i], tokens, 0))
            done[i] += count
        aux = torch.randn(num_aux, sum(new), HIDDEN, generator=generator)
        feature_TC = torch.randn(sum(new), HIDDEN, generator=generator)
        outcomes = []
        for head, kv in zip(heads, pools, strict=True):
            row_N = torch.tensor(range(sum(new)) if wanted is None else wanted)
            batch = build_batch(spans, BLOCK, CPU)._replace(logit_row_N=row_N)
            features = feature_TC if wanted is None else aux.unbind()
            output = head.run(batch, kv, features=features, logits=wanted is None)
            logits_NV, hidden_NC = output.logits_NV, output.hidden_NC
            assert hidden_NC is not None
            if wanted is not None:
                assert not len(logits_NV)
                logits_NV = head.logits(hidden_NC)
            outcomes.append([hidden_NC, logits_NV.clone(), *kv.keys, *kv.values])
        for found, expected in zip(*outcomes, strict=True):
            torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)


def logits(folder: Path) -> None:
    """Rows of one call do not change the next. More rows than the buffer has are right, too."""
    head, plain = both(folder, drafted=128)
    for rows in (ROWS, 1, 3, ROWS + 2, ROWS):
        hidden_NC = torch.randn(rows, HIDDEN)
        found, expected = head.logits(hidden_NC), plain.logits(hidden_NC)
        torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)
        assert (found == -torch.inf).sum() == rows * (VOCABULARY - 128)
        head.logits(torch.full((ROWS, HIDDEN), torch.nan))


def padding(folder: Path) -> None:
    head, _ = both(folder, drafted=128)
    generator = torch.Generator().manual_seed(2)
    aux = torch.randn(3, 7, HIDDEN, generator=generator)
    outcomes = []
    for behind in ([], [-1, 10**9, 3]):
        kv = KVPool(head.stack.layer_shapes, 6, BLOCK, dtype=head.stack.dtype, device=CPU)
        spans = [Span([1, 2], 0, [5, 6, 7, 8, 9], 0), Span([4, 3], 0, [11, 12], 0)]
        batch = build_batch(spans, BLOCK, CPU)
        token_T = torch.cat([batch.token_T, torch.tensor(behind, dtype=torch.int64)])
        padded = torch.cat([aux, torch.full((3, len(behind), HIDDEN), torch.inf)], dim=1)
        where = batch.attention
        attention = AttentionBatch(
            where.query_start_B1, where.length_B, where.block_BL, BLOCK, values_fit=True
        )
        row_N = torch.tensor([4, 6])
        batch = batch._replace(token_T=token_T, attention=attention, logit_row_N=row_N)
        output = head.run(batch, kv, features=padded.unbind(), logits=False)
        outcomes.append([output.hidden_NC, *kv.keys, *kv.values])
    for without, with_padding in zip(*outcomes, strict=True):
        torch.testing.assert_close(with_padding, without, atol=1e-5, rtol=1e-5)


def refuses(folder: Path) -> None:
    """A head with another result, or with a logit that is not dropped, is not used."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("foretoken.models.eagle3").addHandler(handler)
    right = get_backend("triton")._kernels

    def wrong_norm(stack: Stack, *sizes: int, deterministic: bool) -> LoadedStack:
        (layer,) = stack.layers
        layers = (layer._replace(feed_norm_C=layer.feed_norm_C * 1.01),)
        return FusedStack(replace(stack, layers=layers), *sizes, deterministic=deterministic)

    def wrong_ids(stack: Stack, *sizes: int, deterministic: bool) -> LoadedStack:
        assert stack.target_ids is not None
        wrong = replace(stack, target_ids=stack.target_ids.flip(0) // 2)
        return FusedStack(wrong, *sizes, deterministic=deterministic)

    for wrong in (wrong_norm, wrong_ids):
        backend = Backend("triton", replace(right, load_stack=wrong))
        assert isinstance(load(folder, backend, drafted=128), StockStack)
        assert "differ from these by" in records.pop()
    wide = replace(read(folder), embedding=Dense(embedding().to(torch.float64)))
    with pytest.raises(UnfitError, match="float64"):
        get_backend("triton").load_stack(wide, 40, ROWS)


def lacks(folder: Path) -> None:
    """The message names what these kernels lack."""
    for switches, named in LACKING:
        with pytest.raises(UnfitError, match=named):
            get_backend("triton").load_stack(read(folder, **switches), 40, ROWS)


LACKING: list[tuple[dict[str, Any], str]] = [
    ({"fc_norm": True, "norm_output": True}, "no `fc_norm`, `norm_output`$"),
    ({"model_type": "qwen3"}, "no `qk_norm`$"),
    ({"attention_bias": True}, "no `qkv_bias`, `o_bias`$"),
    ({"sliding_window": 5}, "no `sliding_window`$"),
    ({"partial_rotary_factor": 0.5}, "no `partial_rotary_factor`$"),
]
CASES: dict[str, Callable[[Path], None]] = {
    **{name: lambda folder, s=switches: agrees(folder, s) for name, switches in SWITCHES.items()},
    "logits": logits,
    "padding": padding,
    "refuses": refuses,
    "lacks": lacks,
}


if __name__ == "__main__":
    report(CASES, sys.argv[1:])
