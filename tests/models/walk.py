"""A model run as an engine runs it: random chunks, decodes, failed verifications."""

from __future__ import annotations

import random

import torch

from foretoken.cache.kv_pool import KVPool
from foretoken.models import CausalLM
from tests.models.batches import Span, build_batch

CPU = torch.device("cpu")


def walk(
    model: CausalLM, texts: list[list[int]], seed: int, block_size: int, fill: float = 0.0
) -> list[dict[int, torch.Tensor]]:
    """Run texts of one length as an engine would: chunks, decodes, and verifies of wrong drafts.

    fill: the initial value of the cache.

    Returns the logits of every position of every text, as last computed.
    """
    rng = random.Random(seed)
    length = len(texts[0])
    columns = -(-(length + 4) // block_size)
    ids = list(range(1, len(texts) * columns + 1))
    rng.shuffle(ids)
    tables = [ids[i * columns : (i + 1) * columns] for i in range(len(texts))]
    kv = new_pool(model, len(ids) + 1, block_size, fill)
    done = [0] * len(texts)
    seen: list[dict[int, torch.Tensor]] = [{} for _ in texts]
    while min(done) < length:
        spans, parts = [], []
        for i in rng.sample(range(len(texts)), rng.randint(1, len(texts))):
            good = min(rng.choice([1, 1, 2, 7]), length - done[i])
            if good == 0:
                continue
            wrong = [rng.randrange(model.vocab_size) for _ in range(rng.choice([0, 0, 2, 4]))]
            tokens = texts[i][done[i] : done[i] + good] + wrong
            wanted = rng.choice([0, len(wrong) + 1, len(tokens)])
            spans.append(Span(tables[i], done[i], tokens, wanted))
            parts.append((i, good, len(tokens), wanted))
        if not spans:
            continue
        logits = model.forward(build_batch(spans, block_size, CPU), kv).logits_NV
        row = 0
        for i, good, count, wanted in parts:
            for k in range(count - wanted, good):
                seen[i][done[i] + k] = logits[row + k - (count - wanted)]
            row += wanted
            done[i] += good
        assert row == len(logits)
    return seen


def logits_of(model: CausalLM, text: list[int]) -> torch.Tensor:
    columns = -(-len(text) // 16)
    batch = build_batch([Span([*range(columns)], 0, text, len(text))], 16, CPU)
    return model.forward(batch, new_pool(model, columns, 16)).logits_NV.clone()


def new_pool(model: CausalLM, num_blocks: int, block_size: int, fill: float = 0.0) -> KVPool:
    kv = KVPool(model.layer_shapes, num_blocks, block_size, dtype=model.dtype, device=CPU)
    for cache in (*kv.keys, *kv.values):
        numbers = cache.untyped_storage().nbytes() // cache.itemsize
        cache.as_strided((numbers,), (1,)).fill_(fill)
    return kv
