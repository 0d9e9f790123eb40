"""`foretoken train-eagle3`: from a target and a file of text to the folder of a head.

Rows of token ids are *own* if the target wrote them, *real* if they are from the data, and *held*
if the head is measured on them but not trained.

Shape suffixes: N rows, L tokens of a row, B rows of a batch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import cycle
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

# Temperatures of the texts that the target writes, each with its share; greedy texts soon repeat.
SAMPLING = ((1.0, 0.35), (0.8, 0.4), (0.0, 0.25))


class Documents(NamedTuple):
    """The contents of a data file.

    texts: texts to learn as they are, and to continue
    prompts: texts that are only continued
    """

    texts: list[str]
    prompts: list[str]


def read_documents(path: Path) -> Documents:
    """Read a data file: a text, or JSON lines with a `text` or a `prompt` each.

    `CheckpointError`: the file cannot be read as UTF-8; `ConfigError`: a line is no such object, or
    there is no text.
    """
    with reading(path):
        content = path.read_text(encoding="utf-8")
    documents = Documents([], [])
    if path.suffix != ".jsonl":
        documents.texts.append(content)
    else:
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                key, text = _parse_line(path, number, line)
                (documents.texts if key == "text" else documents.prompts).append(text)
    if not any(text.strip() for text in (*documents.texts, *documents.prompts)):
        raise ConfigError("data", str(path), "a file with text in it")
    return documents


def _parse_line(path: Path, number: int, line: str) -> tuple[str, str]:
    """Read a JSON line; returns its key, `text` or `prompt`, and its string."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        row = None
    keys = [key for key in ("text", "prompt") if isinstance(row, dict) and key in row]
    if len(keys) != 1 or not isinstance(row[keys[0]], str):
        bound = "a JSON object with one of `text` and `prompt`, a string"
        raise ConfigError(f"data, line {number} of {path.name}", line, bound)
    return keys[0], row[keys[0]]


class Batches:
    """Batches of rows, in a new order for each epoch; batch i is the same in every run.

    own_NL: rows written by the target; may be empty if `real_NL` is not
    real_NL: rows of the data; may be empty
    real_share: share of rows of the data in each batch
    """

    def __init__(
        self, own_NL: Tensor, real_NL: Tensor, batch_size: int, real_share: float, seed: int
    ) -> None:
        num_real = round(batch_size * real_share) if len(own_NL) and len(real_NL) else 0
        if not len(own_NL):
            num_real = batch_size
        # Rows, their number in each batch, and the seed of their order.
        self._parts = [(own_NL, batch_size - num_real, 2 * seed), (real_NL, num_real, 2 * seed + 1)]

    def batch(self, index: int) -> Tensor:
        """The ids of batch `index`, int64 [B, L], on the rows' device."""
        parts = []
        for rows_NL, count, seed in self._parts:
            numbers, size = range(index * count, (index + 1) * count), len(rows_NL)
            rows = [_row_order(seed, i // size, size)[i % size] for i in numbers]
            parts += [rows_NL[rows].long()] if rows else []
        return torch.cat(parts)


@lru_cache(maxsize=4)  # the last two epochs of each part: a batch may span both
def _row_order(seed: int, epoch: int, size: int) -> list[int]:
    generator = torch.Generator().manual_seed((seed << 24) + epoch & (1 << 63) - 1)
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def cut(tokens: Sequence[int] | Tensor, length: int) -> Tensor:
    """Cut a sequence of ids into rows, int32 [N, length]; the remainder is dropped."""
    num_used = len(tokens) // length * length
    return torch.as_tensor(tokens[:num_used], dtype=torch.int32).view(-1, length)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """All texts as one sequence of ids, each followed by the tokenizer's end of text, if any."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [i for text in texts for i in (*tokenizer.encode(text), *end)]


def pick_prompts(
    tokenizer: Any, documents: Documents, stream: Sequence[int], length: int, count: int, seed: int
) -> Iterator[list[int]]:
    """`count` prompts of at most `length` tokens, for the target to continue.

    The file's prompts alternate with random windows of its texts. Of long prompts the end is used.

    stream: the ids of all texts, from `encode`
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = [ids for p in documents.prompts if (ids := tokenizer.encode(p)[-length:])]
    starts = torch.randint(max(1, len(stream) - length), (count,), generator=generator).tolist()
    for i, start in enumerate(starts):
        if prompts and (not stream or i % 2):
            yield prompts[i // (2 if stream else 1) % len(prompts)]
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
    """The `config.json` of a head for a target: one Llama layer with the target's sizes.

    `ConfigError`: `draft_vocab_size` is larger than the target's vocabulary.
    `UnsupportedModelError`: the target has too few layers.

    target: the target's Transformers configuration
    """
    text = target.get_text_config()
    if text.num_hidden_layers < 3:
        why = f"it needs 3 layers or more, and has {text.num_hidden_layers}."
        raise UnsupportedModelError(f"No head can be trained for this `{text.model_type}`: {why}")
    num_draft_ids = draft_vocab_size or text.vocab_size
    if num_draft_ids > text.vocab_size:
        bound = f"at most {text.vocab_size}, the target's"
        raise ConfigError("draft_vocab_size", draft_vocab_size, bound)
    width, heads = text.hidden_size, text.num_attention_heads
    rope = _get(text, "rope_parameters", {})
    if rope.get("rope_type") not in ROPE_TYPES:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": intermediate_size or _get(text, "intermediate_size", 4 * width),
        "num_attention_heads": heads,
        "num_key_value_heads": _get(text, "num_key_value_heads", heads),
        "head_dim": _get(text, "head_dim", width // heads),
        "max_position_embeddings": _get(text, "max_position_embeddings", 2048),
        "rms_norm_eps": _get(text, "rms_norm_eps", 1e-6),
        # Without a partial factor: fused heads can only rotate all dimensions.
        "rope_parameters": {k: v for k, v in rope.items() if k != "partial_rotary_factor"},
        "vocab_size": text.vocab_size,
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "draft_vocab_size": num_draft_ids,
        "fc_norm": fc_norm,
        "norm_output": norm_output,
        "norm_before_residual": False,
        "dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [*default_aux_layers(text.num_hidden_layers)],
            "use_aux_hidden_state": True,
        },
    }


def _get(config: Any, name: str, default: Any) -> Any:  # the default also replaces None
    value = getattr(config, name, None)
    return default if value is None else value


def save_weights(folder: Path, weights: dict[str, Tensor], target_ids: Tensor | None) -> None:
    """Write `model.safetensors` in bfloat16, in the layout of the original heads.

    weights: the tensors by the names of `speculators`
    target_ids: as in `Trainer`
    """
    from safetensors.torch import save_file

    stored = {
        name.replace("layers.0.", "midlayer."): weight.detach().to("cpu", torch.bfloat16)
        for name, weight in weights.items()
    }
    if target_ids is not None:
        ids = target_ids.cpu()
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        stored["d2t"] = ids - torch.arange(len(ids))
        stored["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    path = folder / "model.safetensors"
    save_file(stored, path, {"format": "pt"})
    path.chmod(0o644)  # like the other files; only the owner could read what `save_file` wrote


def write_card(folder: Path, facts: dict[str, Any], history: list[dict[str, float]]) -> None:
    """Write `README.md`: the head's target, the options of its training, the results."""
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


_REPORTS = 20  # number of lines of progress per training
_HELD_SHARE = 1 / 32  # share of the texts on which the head is measured, but not trained


class Training:
    """One call of `foretoken train-eagle3`.

    say: called with lines of progress
    note: called with a line about the work done, which Ctrl-C reports
    trainer: the class of the object that does the steps; a subclass may set it
    """

    trainer: type[Trainer] = Trainer

    def __init__(
        self, options: TrainOptions, say: Callable[[str], None], note: Callable[[str], None]
    ) -> None:
        self._say, self._note = say, note
        self.folder = Path(options.output)
        self._options_file = self.folder / "training" / "options.json"
        self._state = self.folder / "training" / "state.safetensors"
        self._texts = self.folder / "training" / "texts.safetensors"
        if options.resume != self._state.exists():
            bound = f"a folder {'with' if options.resume else 'without'} a checkpoint"
            remedy = "" if options.resume else "`resume` continues from the checkpoint."
            raise ConfigError("output", options.output, f"{bound} (`{self._state}`)", remedy)
        if options.resume:
            with reading(self._options_file):
                begun = json.loads(self._options_file.read_text(encoding="utf-8"))
                options = options.resumed(begun)
        self.options = options

    def run(self) -> None:
        """Train, or resume a training, and write the folder, also after Ctrl-C or SIGTERM."""
        options, device = self.options, choose_device(self.options.device)
        config = self._describe()
        own_NL, real_NL = self._rows()
        num_held = max(1, int(len(own_NL) * _HELD_SHARE))
        held_NL, own_NL = own_NL[:num_held].to(device), own_NL[num_held:].to(device)
        trainer = self._make_trainer(config, own_NL, device)
        if options.resume:
            trainer.load(self._state)
        settings = (options.batch_size, options.real_share, options.seed)
        batches = Batches(own_NL, real_NL.to(device), *settings)
        interrupt = Interrupt("return")
        with interrupt.caught():
            self._loop(trainer, batches, interrupt)
            self._save(trainer, held_NL)
        interrupt.deliver([])

    def _describe(self) -> Eagle3Config:
        """Write the options and the head's `config.json`; returns the latter. Errors: see
        `resolve_checkpoint` and `describe_head`."""
        options = self.options
        folder = resolve_checkpoint(options.model)
        with quiet_transformers():
            target = parse_config(folder, read_config(folder)["model_type"])
        names = ("draft_vocab_size", "intermediate_size", "fc_norm", "norm_output")
        config = describe_head(target, **{name: getattr(options, name) for name in names})
        self._texts.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(options.to_resume(), indent=1) + "\n"
        self._options_file.write_text(text, encoding="utf-8")
        (self.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return read_eagle3_config(self.folder)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """The own and the real rows, int32. They are kept in a file, which `resume` reads."""
        from safetensors.torch import load_file, save_file

        from foretoken import LLM, SamplingParams

        if self.options.resume:
            with reading(self._texts):
                texts = load_file(self._texts)
            return texts["own"], texts["real"]
        options, documents = self.options, read_documents(Path(self.options.data))
        tokenizer = load_tokenizer(options.model)
        if tokenizer is None:
            raise CheckpointError(f"`{options.model}` has no tokenizer: nothing can be encoded.")
        stream, length = encode(tokenizer, documents.texts), options.length
        settings = (length // 2, options.num_texts, options.seed)
        prompts = list(pick_prompts(tokenizer, documents, stream, *settings))
        temperatures = [t for t, share in SAMPLING for _ in range(round(share * 20))]
        params = []
        for prompt, temperature in zip(prompts, cycle(temperatures), strict=False):
            room = length - len(prompt)
            params.append(SamplingParams(temperature=temperature, max_tokens=room, ignore_eos=True))
        self._say(f"The target writes {len(prompts)} texts of {length} tokens.")
        engine: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
        with LLM(options.model, **engine, max_model_len=length, seed=options.seed) as llm:
            outputs = llm.generate(prompts, params)
        rows = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
        texts = {"own": torch.tensor(rows, dtype=torch.int32), "real": cut(stream, length)}
        save_file(texts, self._texts)
        return texts["own"], texts["real"]

    def _make_trainer(self, config: Eagle3Config, own_NL: Tensor, device: torch.device) -> Trainer:
        options, target_ids = self.options, None
        layers = config.aux_layers or ()
        model = load_model(
            options.model, device=device, dtype=options.dtype, backend="torch",
            max_model_len=options.length, view=TargetView(layers, head=True, module=True),
        )  # fmt: skip
        model.module.set_attn_implementation("sdpa")  # whole texts instead of a paged cache
        target = Target(model.module, plain(model.embedding), plain(model.head), layers)
        if config.draft_vocab_size < config.vocab_size:
            counts = torch.bincount(own_NL.flatten(), minlength=config.vocab_size)
            commonest = counts.argsort(descending=True, stable=True)[: config.draft_vocab_size]
            target_ids = commonest.sort().values
        recipe = Recipe(**{name: getattr(options, name) for name in Recipe._fields})
        sample_BT, tied = own_NL[: options.batch_size].long(), options.tied_head
        return self.trainer(config, target, recipe, sample_BT, target_ids=target_ids, tied=tied)

    def _loop(self, trainer: Trainer, batches: Batches, interrupt: Interrupt) -> None:
        options, report_every = self.options, max(1, self.options.steps // _REPORTS)
        start, first_step = time.perf_counter(), trainer.step
        while trainer.step < options.steps and interrupt.name is None:
            loss = trainer.train(batches.batch(trainer.step))
            done = trainer.step
            if done % report_every == 0 or done == options.steps:
                seconds = (time.perf_counter() - start) / (done - first_step)
                self._report(trainer, loss.item(), seconds)
            if done % options.save_every == 0:
                trainer.save(self._state)
            self._note(f"{done} of {options.steps} steps were done; `--resume` goes on from there.")

    def _report(self, trainer: Trainer, loss: float, seconds: float) -> None:
        """Show progress; `seconds` is a step's mean time. `ConfigError` if the loss diverged."""
        done, options = trainer.step, self.options
        if not math.isfinite(loss):
            bound = f"lower: the loss is {loss} at step {done}"
            raise ConfigError("learning_rate", options.learning_rate, bound)
        trainer.history.append({"step": done, "loss": loss})
        left_s = (options.steps - done) * seconds
        kind = "kl" if done <= options.kl_share * options.steps else options.loss
        self._say(f"step {done} of {options.steps}: loss {loss:.4f} ({kind}), {left_s:.0f} s left")

    def _save(self, trainer: Trainer, held_NL: Tensor) -> None:
        options = self.options
        trainer.save(self._state)
        save_weights(self.folder, trainer.weights, trainer.target_ids)
        facts: dict[str, Any] = asdict(options)
        for name in ("output", "resume", "save_every"):
            del facts[name]
        facts["data"] = Path(options.data).name
        facts["steps"] = f"{trainer.step} of {options.steps}"
        for temperature in (1.0, 0.5):
            chances = trainer.evaluate(held_NL, options.batch_size, temperature)
            name = f"accepted at T={temperature:g} on texts left out of training, by position"
            facts[name] = ", ".join(f"{chance:.3f}" for chance in chances)
            self._say(f"{name}: {facts[name]}")
        write_card(self.folder, facts, trainer.history)
        self._say(f"Wrote `{self.folder}`.")
