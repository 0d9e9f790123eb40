"""Is a token that differs a near-tie, or is it wrong?

Batches and devices round differently, and a token parts where a draw, an acceptance or a filter
hangs on that. The gap of two logits tells this of a greedy token alone. So the request is served
again, on the host, by the embedded pair with every weight changed by about 1e-5 of itself: its
logits move by 8e-5 (root mean square, 6e-4 at most), those of float32 by 2e-6 (3e-5 at most) from
float64's. If one of eight such pairs gives the same tokens up to and including the one that
differs, it is a near-tie. Of 36 texts parted by weights changed a hundred times as much, one was.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from foretoken import LLM, SamplingParams
from foretoken.models import resolve_checkpoint

NUDGE, MODELS = 1e-5, 8
PAIR = ("tiny-python", "tiny-python-draft")
Ids = list[int]


@dataclass(frozen=True)
class Parted:
    """A sample that has other tokens than another time.

    Attributes:
        params: with the K that the request really had.
        sample: which of its n.
        tokens: up to and including the first that differs; if it ended where the other one went
            on, all of them.
    """

    prompt: Ids
    params: SamplingParams
    sample: int
    tokens: Ids
    ended: bool

    @classmethod
    def of(
        cls, prompt: Ids, params: SamplingParams, sample: int, got: Ids, other: Ids
    ) -> Parted | None:
        """None if they are equal."""
        same = next((i for i, (a, b) in enumerate(zip(got, other, strict=False)) if a != b), None)
        if same is None and len(got) == len(other):
            return None
        ended = same is None and len(got) < len(other)
        first = len(got) if ended else min(len(got), len(other)) if same is None else same
        return cls(prompt, params, sample, got[: first + 1], ended)

    def agrees(self, tokens: Ids) -> bool:
        """Whether these, of the whole sample, part in the same way."""
        return (tokens if self.ended else tokens[: len(self.tokens)]) == self.tokens


def unexplained(
    parted: Sequence[Parted], speculation: dict[str, Any] | None, nudge: float = NUDGE
) -> list[Parted]:
    """Those that are no near-ties, of requests to the embedded pair.

    Args:
        speculation: as they were served with; a draft model is the pair's.
    """
    left = list(parted)
    for target, draft in nudged_pairs(nudge):
        if not left:
            break
        given = speculation and _with_draft(speculation, draft)
        with LLM(str(target), given, device="cpu", dtype="float32", max_num_seqs=32) as llm:
            outputs = llm.generate([p.prompt for p in left], [p.params for p in left])
        served = zip(left, outputs, strict=True)
        left = [p for p, out in served if not p.agrees(out.outputs[p.sample].token_ids)]
    return left


def _with_draft(speculation: dict[str, Any], draft: Path) -> dict[str, Any]:
    """The same drafters, and this draft model."""
    if "drafters" in speculation:
        own = [_with_draft(entry, draft) for entry in speculation["drafters"]]
        return {**speculation, "drafters": own}
    if speculation.get("method") == "draft_model":
        return {**speculation, "model": str(draft)}
    return speculation


def nudged_pairs(nudge: float) -> Iterator[list[Path]]:
    """Folders of target and draft, of which every weight is a little off; gone with the next."""
    for seed in range(MODELS):
        generator = torch.Generator().manual_seed(seed)
        with tempfile.TemporaryDirectory() as name:
            folders = []
            for model in PAIR:
                folder = Path(shutil.copytree(resolve_checkpoint(model), Path(name) / model))
                for file in folder.glob("*.safetensors"):
                    tensors = load_file(file)
                    for key, tensor in tensors.items():
                        noise = torch.randn(tensor.shape, generator=generator)
                        tensors[key] = tensor.float() * (1 + nudge * noise)
                    save_file(tensors, file, metadata={"format": "pt"})
                folders.append(folder)
            yield folders
