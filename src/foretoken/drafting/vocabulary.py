"""A draft model whose token ids are not the target's: drafts, and their q, by the target's ids.

What both tokenizers have (the same text, whatever its ids) the draft model can draft. Its logits
are put in the order of the target's ids, -inf where it has no such token, before a draft is drawn:
the softmax of that is q restricted to the shared tokens and normalised there. So q is real, noise
is the target's own, and every rule verifies as ever. It is not lossy: q may be any distribution.

The draft model reads one of its tokens for each token of the target, so that positions, lengths and
cache blocks are the same in both. For a token that it lacks it reads the last of those into which
its own tokenizer cuts the text: it misses what stands before that. This costs acceptance after such
tokens, and nothing else.

Shape suffixes: T packed tokens, N rows of logits, V the target's vocabulary.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.base import DrafterSetup
from foretoken.errors import ConfigError
from foretoken.models import CausalLM, folder_of, load_tokenizer
from foretoken.ops import ForwardOutput
from foretoken.ops.steps import ForwardBatch

_log = logging.getLogger(__name__)

BUILT_IN_DRAFTS = {"tiny-python": "tiny-python-draft"}

LEAST_SHARE, LOW_SHARE = 0.01, 0.25
"""Of the target's tokens: with less the draft is refused, or warned of. The tokens that two
tokenizers share are the frequent ones: a small share says less than it seems."""

_PARTIAL = "\ufffd"  # what bytes decode to that are no whole character


class IdMap(NamedTuple):
    """The draft model's ids by the target's.

    draft_id_V: int64, what it reads for each token of the target; also the column of its logits
    missing_V:  bool, whether it cannot draft the token
    """

    draft_id_V: Tensor
    missing_V: Tensor


class DraftNetwork(NamedTuple):
    """A draft model that speaks by the target's ids; `ids` is None if they are its own."""

    model: CausalLM
    ids: IdMap | None

    def forward(self, batch: ForwardBatch, kv: KVPool) -> ForwardOutput:
        """Run the packed tokens and write their K/V."""
        if self.ids is None:
            return self.model.forward(batch, kv)
        own = batch._replace(token_T=self.ids.draft_id_V[batch.token_T])
        logits = self.model.forward(own, kv).logits_NV[:, self.ids.draft_id_V]
        return ForwardOutput(logits.masked_fill_(self.ids.missing_V, -torch.inf))


def load_draft(setup: DrafterSetup) -> DraftNetwork:
    """Load the draft model.

    Raises:
        ConfigError: it shares too few tokens with the target; or it has another number of logits,
            and there are no two tokenizers to compare.
    """
    name, folder, tokenizer = find_draft(setup)
    match = Match(None, {})
    is_known = setup.tokenizer is not None and tokenizer is not None
    if is_known:
        match = match_tokenizers(name, setup.tokenizer, tokenizer)
    model = load_weights(setup, folder)
    if not is_known and model.vocab_size != setup.vocab_size:
        bound = "a model with the target's vocabulary, or with a tokenizer, as the target"
        remedy = (
            f"It has {model.vocab_size} logits where the target has {setup.vocab_size}; without "
            "tokenizers nothing says which tokens are the same. Choose another, or `ngram`."
        )
        raise ConfigError("speculative_config.model", name, bound, remedy)
    ids = match.ids(setup.vocab_size, model.vocab_size, setup.device)
    return DraftNetwork(model, ids)


def find_draft(setup: DrafterSetup) -> tuple[str, Path, Any]:
    """The draft model's name, its folder, and its tokenizer, if it has one."""
    config = setup.config
    name = setup.speculation.model or BUILT_IN_DRAFTS.get(config.model)
    if name is None:
        remedy = "Name a small checkpoint that shares the target's tokenizer, or use `ngram`."
        raise ConfigError("speculative_config.model", None, "a draft model", remedy)
    folder = folder_of(config, name, setup.speculation.revision)
    return name, folder, load_tokenizer(folder)


def load_weights(setup: DrafterSetup, folder: Path) -> CausalLM:
    """The draft model, of no longer a context than the target's."""
    config = setup.config
    return setup.load_model(
        folder, device=setup.device, dtype=config.dtype, backend=setup.backend,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
        max_model_len=setup.max_model_len, shorten=True,
    )  # fmt: skip


class Match(NamedTuple):
    """Two tokenizers compared.

    shared: the draft's id of each id of the target's that both have; None: the same tokenizer
    stand_ins: of each other id of the target's, what the draft model reads
    """

    shared: dict[int, int] | None
    stand_ins: dict[int, int]

    def ids(self, vocab_size: int, draft_size: int, device: torch.device) -> IdMap | None:
        """The map between vocabularies, padded to these sizes; None: none is needed."""
        shared = self.shared
        if shared is None:
            if vocab_size == draft_size:
                return None
            shared = {i: i for i in range(min(vocab_size, draft_size))}
        missing_V = torch.ones(vocab_size, dtype=torch.bool)
        draft_id_V = torch.zeros(vocab_size, dtype=torch.int64)
        for known, pairs in ((True, shared), (False, self.stand_ins)):
            fitting = [(i, j) for i, j in pairs.items() if i < vocab_size and j < draft_size]
            target_N, draft_N = torch.tensor(fitting, dtype=torch.int64).view(-1, 2).unbind(1)
            draft_id_V[target_N] = draft_N
            missing_V[target_N] &= not known
        return IdMap(draft_id_V.to(device), missing_V.to(device))


def match_tokenizers(name: str, target: Any, draft: Any) -> Match:
    """Find the tokens that two tokenizers share.

    Raises:
        ConfigError: fewer than `LEAST_SHARE` of the target's; `name` is the draft model's.
    """
    target_pieces = target.get_vocab()
    if draft.get_vocab() == target_pieces:
        return Match(None, {})
    by_text, texts = _ids_by_text(draft), _ids_by_text(target)
    shared = {i: by_text[key] for key, i in texts.items() if key in by_text}
    taken = set(shared.values())
    for role in ("bos_token_id", "eos_token_id"):
        theirs, own = getattr(target, role), getattr(draft, role)
        if theirs is not None and own is not None and theirs not in shared and own not in taken:
            shared[theirs] = own
            taken.add(own)
    share = len(shared) / len(target_pieces)
    if share < LEAST_SHARE:
        bound = f"a model whose tokenizer has {LEAST_SHARE:.0%} of the target's tokens or more"
        remedy = (
            f"It has {len(shared)} of {len(target_pieces)}. Method `draft_text` drafts with it by "
            "text; or choose a draft whose tokenizer is nearer to the target's."
        )
        raise ConfigError("speculative_config.model", name, bound, remedy)
    _log.log(
        logging.WARNING if share < LOW_SHARE else logging.INFO,
        "`%s` has another tokenizer: it can draft %d of the target's %d tokens (%.0f%%).%s",
        name, len(shared), len(target_pieces), 100 * share,
        " Few drafts may be accepted." if share < LOW_SHARE else "",
    )  # fmt: skip
    others = {i: text for (_, text), i in texts.items() if i not in shared}
    return Match(shared, _stand_ins(others, draft))


def _ids_by_text(tokenizer: Any) -> dict[tuple[bool, str], int]:
    """The id of each token by its text as it stands after a letter; of special ones by name."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i for i, token in added.items() if token.special}
    before = tokenizer.convert_tokens_to_string(["a"])

    def key(piece: str, i: int) -> tuple[bool, str]:
        if i in special:
            return True, piece
        text = piece if i in added else tokenizer.convert_tokens_to_string(["a", piece])
        # Bytes that are no character are known by what tokenizers of one kind call them.
        return (True, piece) if _PARTIAL in text else (False, text.removeprefix(before))

    # `<0x41>` and `A` are one text: the second is what a tokenizer makes of it.
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda e: (e[0].startswith("<0x"), e[1]))
    found: dict[tuple[bool, str], int] = {}
    for piece, i in pieces:
        found.setdefault(key(piece, i), i)
    return found


def _stand_ins(texts: dict[int, str], draft: Any) -> dict[int, int]:
    """The last token that the draft's tokenizer makes of each text; its unknown one of nothing."""
    unknown = getattr(draft, "unk_token_id", None) or 0
    cut = draft([*texts.values()], add_special_tokens=False)["input_ids"] if texts else []
    return {i: ids[-1] if ids else unknown for i, ids in zip(texts, cut, strict=True)}
