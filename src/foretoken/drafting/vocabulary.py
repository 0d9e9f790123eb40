"""A draft model with other token ids than the target: its drafts and their q use the target's ids.

The draft model can draft the tokens that have the same text in both tokenizers, whatever their ids.
Before a draft is drawn, the draft model's logits are put in the order of the target's ids, with
-inf for tokens that the draft model lacks. Their softmax is the draft model's distribution
restricted to the shared tokens: a real q, with the noise of the target's ids, for every rule. This
is lossless, because q may be any distribution.

The draft model reads one of its tokens for each token of the target, so positions, lengths and
cache blocks are the same in both. If the draft model lacks a token, it reads the last of its tokens
that encode the token's text. Losing the rest of the text only costs acceptance after such tokens.

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
"""Shares of the target's tokens below which a draft model is refused, or used with a warning. The
shared tokens are the frequent ones, so even a small share may cover most of a text."""

PARTIAL = "\ufffd"  # decoded from bytes that are not a whole character


class IdMap(NamedTuple):
    """A map from the target's ids to the draft model's ids.

    draft_id_V: int64, the id that the draft model reads for each token of the target; also the
        column of the token in the draft model's logits
    missing_V: bool, whether the draft model cannot draft the token
    """

    draft_id_V: Tensor
    missing_V: Tensor


class DraftNetwork(NamedTuple):
    """A draft model that takes the target's ids; `ids` is None if both models have the same ids."""

    model: CausalLM
    ids: IdMap | None

    def forward(self, batch: ForwardBatch, kv: KVPool) -> ForwardOutput:
        """Run the packed tokens and write their K/V. Tokens and columns of logits have the target's
        ids; logits of tokens that the draft model lacks are -inf."""
        if self.ids is None:
            return self.model.forward(batch, kv)
        draft_batch = batch._replace(token_T=self.ids.draft_id_V[batch.token_T])
        logits_NV = self.model.forward(draft_batch, kv).logits_NV[:, self.ids.draft_id_V]
        return ForwardOutput(logits_NV.masked_fill_(self.ids.missing_V, -torch.inf))


def load_draft(setup: DrafterSetup) -> DraftNetwork:
    """Load the draft model, with a map of ids if it has other ids than the target; `ConfigError` if
    no model is named, too few tokens are shared, or numbers of logits differ without tokenizers."""
    name, folder, tokenizer = find_draft(setup)
    match = Match(None, {})
    have_tokenizers = setup.tokenizer is not None and tokenizer is not None
    if have_tokenizers:
        match = match_tokenizers(name, setup.tokenizer, tokenizer)
    model = load_weights(setup, folder)
    if not have_tokenizers and model.vocab_size != setup.vocab_size:
        bound = "a model with the target's vocabulary, if it or the target has no tokenizer"
        reason = f"It has {model.vocab_size} logits, the target has {setup.vocab_size}."
        remedy = f"{reason} Choose another model, or method `ngram`."
        raise ConfigError("speculative_config.model", name, bound, remedy)
    ids = match.ids(setup.vocab_size, model.vocab_size, setup.device)
    return DraftNetwork(model, ids)


def find_draft(setup: DrafterSetup) -> tuple[str, Path, Any]:
    """The draft model's name, folder, and tokenizer (None if it has none); `ConfigError` if the
    options name no draft model, and none is built in for the target."""
    config = setup.config
    name = setup.speculation.model or BUILT_IN_DRAFTS.get(config.model)
    if name is None:
        remedy = "Name a small checkpoint that shares the target's tokenizer, or use `ngram`."
        raise ConfigError("speculative_config.model", None, "a draft model", remedy)
    folder = folder_of(config, name, setup.speculation.revision)
    return name, folder, load_tokenizer(folder)


def load_weights(setup: DrafterSetup, folder: Path) -> CausalLM:
    """Load the draft model, with a context no longer than the target's."""
    config = setup.config
    return setup.load_model(
        folder, device=setup.device, dtype=config.dtype, backend=setup.backend,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
        max_model_len=setup.max_model_len, shorten=True,
    )  # fmt: skip


class Match(NamedTuple):
    """The result of comparing the target's tokenizer with the draft model's.

    shared: the draft's id of each shared token, by the target's id; None: the vocabularies are
        equal
    stand_ins: the draft's id that is read for each other token, by the target's id
    """

    shared: dict[int, int] | None
    stand_ins: dict[int, int]

    def ids(self, vocab_size: int, draft_size: int, device: torch.device) -> IdMap | None:
        """The map of ids; None if the ids and the two models' numbers of logits are equal."""
        shared = self.shared
        if shared is None:
            if vocab_size == draft_size:
                return None
            shared = {i: i for i in range(min(vocab_size, draft_size))}
        missing_V = torch.ones(vocab_size, dtype=torch.bool)
        draft_id_V = torch.zeros(vocab_size, dtype=torch.int64)
        for can_draft, pairs in ((True, shared), (False, self.stand_ins)):
            fitting = [(i, j) for i, j in pairs.items() if i < vocab_size and j < draft_size]
            target_N, draft_N = torch.tensor(fitting, dtype=torch.int64).view(-1, 2).unbind(1)
            draft_id_V[target_N] = draft_N
            missing_V[target_N] &= not can_draft
        return IdMap(draft_id_V.to(device), missing_V.to(device))


def match_tokenizers(name: str, target: Any, draft: Any) -> Match:
    """Find the tokens that two tokenizers share, and log their share of the target's tokens;
    `ConfigError`, about the draft model `name`, if the share is less than `LEAST_SHARE`."""
    target_vocab = target.get_vocab()
    if draft.get_vocab() == target_vocab:
        return Match(None, {})
    draft_ids, target_ids = _ids_by_text(draft), _ids_by_text(target)
    shared = {i: draft_ids[key] for key, i in target_ids.items() if key in draft_ids}
    used = set(shared.values())
    for role in ("bos_token_id", "eos_token_id"):  # these may have different texts
        target_id, draft_id = getattr(target, role), getattr(draft, role)
        if None not in (target_id, draft_id) and target_id not in shared and draft_id not in used:
            shared[target_id] = draft_id
            used.add(draft_id)
    share = len(shared) / len(target_vocab)
    if share < LEAST_SHARE:
        bound = f"a model whose tokenizer has {LEAST_SHARE:.0%} of the target's tokens or more"
        remedy = (
            f"It has {len(shared)} of {len(target_vocab)}. Use method `draft_text`, which drafts "
            "text, or a draft model with a tokenizer that is more like the target's."
        )
        raise ConfigError("speculative_config.model", name, bound, remedy)
    _log.log(
        logging.WARNING if share < LOW_SHARE else logging.INFO,
        "`%s` has another tokenizer: it can draft %d of the target's %d tokens (%.0f%%).%s",
        name, len(shared), len(target_vocab), 100 * share,
        " Few drafts may be accepted." if share < LOW_SHARE else "",
    )  # fmt: skip
    unshared = {i: text for (_, text), i in target_ids.items() if i not in shared}
    return Match(shared, _stand_ins(unshared, draft))


def _ids_by_text(tokenizer: Any) -> dict[tuple[bool, str], int]:
    """Token ids by (False, text of the token after a letter); by (True, name of the token) for
    special tokens, and for tokens that are only part of a character."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i for i, token in added.items() if token.special}
    letter = tokenizer.convert_tokens_to_string(["a"])

    def key(name: str, i: int) -> tuple[bool, str]:
        if i in special:
            return True, name
        text = name if i in added else tokenizer.convert_tokens_to_string(["a", name])
        # A partial character has no text. Similar tokenizers name it alike.
        return (True, name) if PARTIAL in text else (False, text.removeprefix(letter))

    # `<0x41>` and `A` have the same text, which a tokenizer encodes as `A`: so `A` comes first.
    names = sorted(tokenizer.get_vocab().items(), key=lambda e: (e[0].startswith("<0x"), e[1]))
    ids: dict[tuple[bool, str], int] = {}
    for name, i in names:
        ids.setdefault(key(name, i), i)
    return ids


def _stand_ins(texts: dict[int, str], draft: Any) -> dict[int, int]:
    """The last of the draft's tokens that encode each text, by the same keys; for a text that no
    tokens encode the draft's unknown token, or 0 if the draft has no unknown token."""
    unknown = getattr(draft, "unk_token_id", None) or 0
    encoded = draft([*texts.values()], add_special_tokens=False)["input_ids"] if texts else []
    return {i: ids[-1] if ids else unknown for i, ids in zip(texts, encoded, strict=True)}
