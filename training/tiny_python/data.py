"""Token streams: encode the splits once, then draw seeded random windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from training.tiny_python.corpus import SourceFile, read_split


def encode_files(tokenizer: PreTrainedTokenizerFast, files: list[SourceFile]) -> np.ndarray:
    """All files as one uint16 stream, an end-of-text token after each. Shape: [N]."""
    end = tokenizer.eos_token_id
    pieces: list[np.ndarray] = []
    for start in range(0, len(files), 512):
        batch = tokenizer([f.text for f in files[start : start + 512]])["input_ids"]
        pieces += [np.array([*ids, end], dtype=np.uint16) for ids in batch]
    return np.concatenate(pieces)


def load_stream(corpus: Path, split: str, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """The token stream of `split` ("train" or "heldout"), cached beside the corpus. Shape: [N]."""
    cache = corpus / f"{split}.tokens.npy"
    if not cache.exists():
        np.save(cache, encode_files(tokenizer, read_split(corpus / f"{split}.jsonl.xz")))
    return torch.from_numpy(np.load(cache).astype(np.int16))


class Windows:
    """Random windows of a token stream that lives on `device`, each epoch without replacement.

    The stream is cut into windows of `length + 1` at a random phase that changes every epoch.
    """

    def __init__(self, stream_N: torch.Tensor, length: int, seed: int, device: str) -> None:
        self._stream_N = stream_N.to(device)
        self._length = length
        self._device = device
        self._rng = np.random.default_rng(seed)
        self._starts = np.empty(0, dtype=np.int64)

    def _refill(self) -> None:
        phase = self._rng.integers(self._length)
        starts = np.arange(phase, len(self._stream_N) - self._length - 1, self._length)
        self._rng.shuffle(starts)
        self._starts = np.concatenate([self._starts, starts])

    def batch(self, rows: int) -> torch.Tensor:
        """`rows` windows of token ids. Shape: [rows, length + 1]."""
        while len(self._starts) < rows:
            self._refill()
        picked, self._starts = self._starts[:rows], self._starts[rows:]
        starts_B = torch.from_numpy(picked).to(self._device)
        offsets_T = torch.arange(self._length + 1, device=self._device)
        return self._stream_N[starts_B[:, None] + offsets_T].long()
