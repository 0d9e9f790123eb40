"""`foretoken train-eagle3`: from a target and a file of text to the folder of a head.

Shape suffixes: N rows of token ids, real ones or the target's own; L tokens of a row, B rows of a
batch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken import __version__
from foretoken.engine.devices import choose_device
from foretoken.errors import CheckpointError, ConfigError, UnsupportedModelError
from foretoken.interrupts import Interrupt
from foretoken.lab.train_eagle3.options import TrainOptions
from foretoken.lab.train_eagle3.trainer import Recipe, Target, Trainer
from foretoken.models import TargetView, load_model, load_tokenizer, resolve_checkpoint
from foretoken.models.checkpoint import parse_config, quiet_transformers, read_config, reading
from foretoken.models.eagle3_config import (
    ROPE_TYPES,
    Eagle3Config,
    default_aux_layers,
    read_eagle3_config,
)
from foretoken.ops.stack import plain

SAMPLING = ((1.0, 0.35), (0.8, 0.4), (0.0, 0.25))
"""Temperatures of the target's texts, with their shares. Greedy ones soon repeat themselves."""


class Documents(NamedTuple):
    """What a data file holds.

    texts: to be learnt as they are, and to be continued
    prompts: only to be continued
    """

    texts: list[str]
    prompts: list[str]


def read_documents(path: Path) -> Documents:
    """Read a text, or JSON lines of which each has a `text` or a `prompt`.

    Raises:
        CheckpointError: the file cannot be read, or is not UTF-8.
        ConfigError: a line is no such object, or nothing is in the file.
    """
    with reading(path):
        content = path.read_text(encoding="utf-8")
    found = Documents([], [])
    if path.suffix != ".jsonl":
        found.texts.append(content)
    else:
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                kind, text = _parse_line(path, number, line)
                (found.texts if kind == "text" else found.prompts).append(text)
    if not any(text.strip() for text in (*found.texts, *found.prompts)):
        raise ConfigError("data", str(path), "a file with text in it")
    return found


def _parse_line(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        row = None
    kinds = [kind for kind in ("text", "prompt") if isinstance(row, dict) and kind in row]
    if len(kinds) != 1 or not isinstance(row[kinds[0]], str):
        bound = "a JSON object with one of `text` and `prompt`, a string"
        raise ConfigError(f"data, line {number} of {path.name}", line, bound)
    return kinds[0], row[kinds[0]]


class Batches:
    """Batches of rows, each epoch in another order; batch i is the same in every run.

    Args:
        own_NL, real_NL: the target's rows and real ones; one of them may have none.
        real_share: of each batch, real ones.
    """

    def __init__(
        self, own_NL: Tensor, real_NL: Tensor, batch_size: int, real_share: float, seed: int
    ) -> None:
        real = round(batch_size * real_share) if len(own_NL) and len(real_NL) else 0
        if not len(own_NL):
            real = batch_size
        self._parts = [(own_NL, batch_size - real, 2 * seed), (real_NL, real, 2 * seed + 1)]

    def batch(self, index: int) -> Tensor:
        """Int64 ids [B, L], on the rows' device."""
        picked = []
        for rows_NL, count, seed in self._parts:
            at = range(index * count, (index + 1) * count)
            rows = [_order(seed, i // len(rows_NL), len(rows_NL))[i % len(rows_NL)] for i in at]
            picked += [rows_NL[rows].long()] if rows else []
        return torch.cat(picked)


@lru_cache(maxsize=4)  # of each part the last two epochs: a batch may lie in both
def _order(seed: int, epoch: int, size: int) -> list[int]:
    generator = torch.Generator().manual_seed((seed << 24) + epoch & (1 << 63) - 1)
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def cut(tokens: Sequence[int] | Tensor, length: int) -> Tensor:
    """Consecutive rows [N, length] of one run of ids, int32; what is left over is dropped."""
    whole = len(tokens) // length * length
    return torch.as_tensor(tokens[:whole], dtype=torch.int32).view(-1, length)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """All texts as one run of ids, an end of text behind each, if the tokenizer has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [i for text in texts for i in (*tokenizer.encode(text), *end)]


def pick_prompts(
    tokenizer: Any, documents: Documents, stream: Sequence[int], length: int, count: int, seed: int
) -> Iterator[list[int]]:
    """`count` prompts of at most `length` tokens: those of the file in turn, ends of long ones;
    and windows of its texts, at random."""
    generator = torch.Generator().manual_seed(seed)
    given = [tokenizer.encode(prompt)[-length:] for prompt in documents.prompts]
    given = [prompt for prompt in given if prompt]
    starts = torch.randint(max(1, len(stream) - length), (count,), generator=generator).tolist()
    for i, start in enumerate(starts):
        if given and (not stream or i % 2):
            yield given[i // (2 if stream else 1) % len(given)]
        else:
            yield list(stream[start : start + length])


def describe_head(
    target: Any,
    *,
    draft_vocab_size: int | None = None,
    intermediate_size: int | None = None,
    fc_norm: bool = False,
    norm_output: bool = False,
) -> dict[str, Any]:
    """`config.json` of a head for a target: one Llama layer of the target's own sizes.

    Args:
        target: its Transformers configuration.

    Raises:
        ConfigError: `draft_vocab_size` is more than the target has.
        UnsupportedModelError: the target has too few layers.
    """
    text = target.get_text_config()
    if text.num_hidden_layers < 3:
        raise UnsupportedModelError(
            f"No head can be trained for this `{text.model_type}`: it takes 3 layers or more, the "
            f"target has {text.num_hidden_layers}."
        )
    drafted = draft_vocab_size or text.vocab_size
    if drafted > text.vocab_size:
        bound = f"at most {text.vocab_size}, the target's"
        raise ConfigError("draft_vocab_size", draft_vocab_size, bound)

    width, heads = text.hidden_size, text.num_attention_heads
    rope = _told(text, "rope_parameters", {})
    if rope.get("rope_type") not in ROPE_TYPES:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": intermediate_size or _told(text, "intermediate_size", 4 * width),
        "num_attention_heads": heads,
        "num_key_value_heads": _told(text, "num_key_value_heads", heads),
        "head_dim": _told(text, "head_dim", width // heads),
        "max_position_embeddings": _told(text, "max_position_embeddings", 2048),
        "rms_norm_eps": _told(text, "rms_norm_eps", 1e-6),
        # Turned whole: that is what fused heads know.
        "rope_parameters": {k: v for k, v in rope.items() if k != "partial_rotary_factor"},
        "vocab_size": text.vocab_size,
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "draft_vocab_size": drafted,
        "fc_norm": fc_norm,
        "norm_output": norm_output,
        "norm_before_residual": False,
        "dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [*default_aux_layers(text.num_hidden_layers)],
            "use_aux_hidden_state": True,
        },
    }


def _told(config: Any, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value


def save_weights(folder: Path, weights: dict[str, Tensor], target_ids: Tensor | None) -> None:
    """Write `model.safetensors` in bfloat16, in the layout of the original heads.

    Args:
        weights: by the names of `speculators`.
        target_ids: as in `Trainer`.
    """
    from safetensors.torch import save_file

    stored = {
        name.replace("layers.0.", "midlayer."): weight.detach().to("cpu", torch.bfloat16)
        for name, weight in weights.items()
    }
    if target_ids is not None:
        ids = target_ids.cpu()
        known = json.loads((folder / "config.json").read_text())["vocab_size"]
        stored["d2t"] = ids - torch.arange(len(ids))
        stored["t2d"] = torch.zeros(known, dtype=torch.bool).index_fill_(0, ids, True)
    path = folder / "model.safetensors"
    save_file(stored, path, {"format": "pt"})
    path.chmod(0o644)  # as the files next to it: it was written for its owner alone


def write_card(folder: Path, facts: dict[str, Any], history: list[dict[str, float]]) -> None:
    """Write `README.md`: what the head is for, how it was trained, what came of it."""
    rows = "\n".join(f"| `{name}` | {value} |" for name, value in facts.items())
    losses = "\n".join(f"| {int(row['step'])} | {row['loss']:.4f} |" for row in history)
    (folder / "README.md").write_text(
        f"""# An EAGLE-3 head for `{facts["model"]}`

It drafts for that model and no other: `{{"method": "eagle3", "model": "this folder"}}`.
Trained by `foretoken train-eagle3` {__version__}.

| | |
|---|---|
{rows}

| step | loss |
|---|---|
{losses}
""",
        encoding="utf-8",
    )


_REPORTS = 20  # of a run
_HELD_SHARE = 1 / 32  # of the texts: the head is measured on them, not trained


class Training:
    """One call of the command.

    Args:
        say: gets a line now and then.
        note: gets what has been done so far, which Ctrl-C reports.

    Attributes:
        trainer: does the steps; a subclass may have another.
    """

    trainer: type[Trainer] = Trainer

    def __init__(
        self, options: TrainOptions, say: Callable[[str], None], note: Callable[[str], None]
    ) -> None:
        self._say, self._note = say, note
        self.folder = Path(options.output)
        self._begun = self.folder / "training" / "options.json"
        self._state = self.folder / "training" / "state.safetensors"
        self._texts = self.folder / "training" / "texts.safetensors"
        if options.resume != self._state.exists():
            bound = "a folder with" if options.resume else "a folder without"
            remedy = "" if options.resume else "`resume` goes on from it."
            raise ConfigError(
                "output", options.output, f"{bound} a checkpoint (`{self._state}`)", remedy
            )
        if options.resume:
            with reading(self._begun):
                options = options.resumed(json.loads(self._begun.read_text(encoding="utf-8")))
        self.options = options

    def run(self) -> None:
        """Train, or go on; writes the folder, also when Ctrl-C or SIGTERM ends it early.

        Raises:
            ConfigError, CheckpointError, UnsupportedModelError.
        """
        options, device = self.options, choose_device(self.options.device)
        config = self._describe()
        own_NL, real_NL = self._read_texts() if options.resume else self._make_texts()
        held = max(1, int(len(own_NL) * _HELD_SHARE))
        held_NL, own_NL = own_NL[:held].to(device), own_NL[held:].to(device)
        trainer = self._trainer(config, own_NL, device)
        if options.resume:
            trainer.load(self._state)
        share = (options.batch_size, options.real_share, options.seed)
        interrupt = Interrupt("return")
        with interrupt.noticed():
            self._loop(trainer, Batches(own_NL, real_NL.to(device), *share), interrupt)
            self._save(trainer, held_NL)
        interrupt.deliver([])

    def _describe(self) -> Eagle3Config:
        """Write the head's `config.json`; what cannot be trained is refused before any work."""
        options = self.options
        folder = resolve_checkpoint(options.model)
        with quiet_transformers():
            target = parse_config(folder, read_config(folder)["model_type"])
        names = ("draft_vocab_size", "intermediate_size", "fc_norm", "norm_output")
        described = describe_head(target, **{name: getattr(options, name) for name in names})
        self._texts.parent.mkdir(parents=True, exist_ok=True)
        self._begun.write_text(json.dumps(options.to_resume(), indent=1) + "\n", encoding="utf-8")
        (self.folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        return read_eagle3_config(self.folder)

    def _make_texts(self) -> tuple[Tensor, Tensor]:
        """The target's rows [N, length] and real ones, int32; kept for `resume`."""
        from safetensors.torch import save_file

        from foretoken import LLM, SamplingParams

        options, documents = self.options, read_documents(Path(self.options.data))
        tokenizer = load_tokenizer(options.model)
        if tokenizer is None:
            raise CheckpointError(f"`{options.model}` has no tokenizer: nothing can be encoded.")
        stream, length = encode(tokenizer, documents.texts), options.length
        chosen = (length // 2, options.num_texts, options.seed)
        given = list(pick_prompts(tokenizer, documents, stream, *chosen))
        temperatures = [t for t, share in SAMPLING for _ in range(round(share * 20))]
        params = [
            SamplingParams(
                temperature=temperatures[i % len(temperatures)],
                max_tokens=length - len(prompt),
                ignore_eos=True,
            )
            for i, prompt in enumerate(given)
        ]
        self._say(f"The target writes {len(given)} texts of {length} tokens.")
        engine: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
        with LLM(options.model, **engine, max_model_len=length, seed=options.seed) as llm:
            outputs = llm.generate(given, params)
        rows = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
        texts = {"own": torch.tensor(rows, dtype=torch.int32), "real": cut(stream, length)}
        save_file(texts, self._texts)
        return texts["own"], texts["real"]

    def _read_texts(self) -> tuple[Tensor, Tensor]:
        from safetensors.torch import load_file

        with reading(self._texts):
            texts = load_file(self._texts)
        return texts["own"], texts["real"]

    def _trainer(self, config: Eagle3Config, own_NL: Tensor, device: torch.device) -> Trainer:
        options, target_ids = self.options, None
        layers = config.aux_layers or ()
        model = load_model(
            options.model,
            device=device,
            dtype=options.dtype,
            backend="torch",
            max_model_len=options.length,
            view=TargetView(layers, head=True, module=True),
        )
        model.module.set_attn_implementation("sdpa")  # whole texts instead of a paged cache
        target = Target(model.module, plain(model.embedding), plain(model.head), layers)
        if config.draft_vocab_size < config.vocab_size:
            counts = torch.bincount(own_NL.flatten(), minlength=config.vocab_size)
            likeliest = counts.argsort(descending=True, stable=True)[: config.draft_vocab_size]
            target_ids = likeliest.sort().values
        recipe = Recipe(**{name: getattr(options, name) for name in Recipe._fields})
        sample_BT = own_NL[: options.batch_size].long()
        return self.trainer(
            config, target, recipe, sample_BT, target_ids=target_ids, tied=options.tied_head
        )

    def _loop(self, trainer: Trainer, batches: Batches, interrupt: Interrupt) -> None:
        options, every = self.options, max(1, self.options.steps // _REPORTS)
        began, first = time.perf_counter(), trainer.step
        while trainer.step < options.steps and interrupt.name is None:
            loss = trainer.train(batches.batch(trainer.step))
            done = trainer.step
            if done % every == 0 or done == options.steps:
                self._report(trainer, loss.item(), (time.perf_counter() - began) / (done - first))
            if done % options.save_every == 0:
                trainer.save(self._state)
            self._note(f"{done} of {options.steps} steps were done; `--resume` goes on from there.")

    def _report(self, trainer: Trainer, loss: float, seconds: float) -> None:
        done, options = trainer.step, self.options
        if not math.isfinite(loss):
            bound = f"lower: the loss is {loss} at step {done}"
            raise ConfigError("learning_rate", options.learning_rate, bound)
        trainer.history.append({"step": done, "loss": loss})
        left = (options.steps - done) * seconds
        kind = "kl" if done <= options.kl_share * options.steps else options.loss
        self._say(f"step {done} of {options.steps}: loss {loss:.4f} ({kind}), {left:.0f} s left")

    def _save(self, trainer: Trainer, held_NL: Tensor) -> None:
        """A checkpoint, the head, and how many drafts are accepted on texts not trained on."""
        options = self.options
        trainer.save(self._state)
        save_weights(self.folder, trainer.weights, trainer.target_ids)
        facts: dict[str, Any] = asdict(options)
        for name in ("output", "resume", "save_every"):
            del facts[name]
        facts["data"] = Path(options.data).name
        facts["steps"] = f"{trainer.step} of {options.steps}"
        for temperature in (1.0, 0.5):
            rates = trainer.evaluate(held_NL, options.batch_size, temperature)
            shown = ", ".join(f"{rate:.3f}" for rate in rates)
            name = f"accepted at T={temperature:g} on texts that it was not trained on, by position"
            facts[name] = shown
            self._say(f"{name}: {shown}")
        write_card(self.folder, facts, trainer.history)
        self._say(f"Wrote `{self.folder}`.")
