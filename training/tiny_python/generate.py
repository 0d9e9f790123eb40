"""Sample the target's own continuations of training text: the drafts' training set."""

from __future__ import annotations

import time

import torch
from transformers import LlamaForCausalLM

from training.tiny_python.data import Windows
from training.tiny_python.decode import StaticDecoder
from training.tiny_python.windows import ends_in_cycle

# (temperature, share of rows); greedy outputs loop early, so they get the smaller share.
TEMPERATURES = ((1.0, 0.35), (0.8, 0.4), (0.0, 0.25))


def row_temperatures(rows: int) -> torch.Tensor:
    """Temperatures of the rows, in blocks by share. Shape: [rows]."""
    bounds, total = [], 0.0
    for temperature, share in TEMPERATURES:
        total += share
        bounds.append((temperature, round(total * rows)))
    out_B = torch.empty(rows)
    first = 0
    for temperature, last in bounds:
        out_B[first:last] = temperature
        first = last
    return out_B


def sample_corpus(
    target: LlamaForCausalLM,
    stream_N: torch.Tensor,
    rounds: int,
    rows: int,
    prompt: int,
    length: int,
    seed: int,
) -> tuple[torch.Tensor, dict[str, object]]:
    """`rounds · rows` sequences of `length` tokens that start with `prompt` tokens of the stream.

    Returns int16 ids of shape [rounds · rows, length] on the CPU, and statistics.
    """
    device = target.device
    torch.manual_seed(seed)
    decoder = StaticDecoder(target, rows, length)
    windows = Windows(stream_N, prompt, seed, str(device))
    temperature_B = row_temperatures(rows).to(device)
    pieces, began = [], time.perf_counter()
    for _ in range(rounds):
        ids_BT = decoder.generate(windows.batch(rows)[:, :prompt], temperature_B)
        pieces.append(ids_BT.to(torch.int16).cpu())
    seconds = time.perf_counter() - began
    cycles = {}
    for temperature, _ in TEMPERATURES:
        picked = pieces[0][(temperature_B == temperature).cpu()].tolist()
        cycles[str(temperature)] = sum(map(ends_in_cycle, picked)) / max(1, len(picked))
    stats = {
        "sequences": rounds * rows,
        "prompt_tokens_each": prompt,
        "new_tokens": rounds * rows * (length - prompt),
        "temperature_shares": [list(pair) for pair in TEMPERATURES],
        "share_ending_in_cycle": cycles,
        "seconds": round(seconds, 1),
    }
    return torch.cat(pieces), stats
