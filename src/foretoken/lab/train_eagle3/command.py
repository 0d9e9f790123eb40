"""`foretoken train-eagle3`: from a target and a file of text to the folder of a head."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.engine.devices import choose_device
from foretoken.errors import CheckpointError, ConfigError
from foretoken.interrupts import Interrupt
from foretoken.lab.train_eagle3.export import describe_head, save_weights, write_card
from foretoken.lab.train_eagle3.options import TrainOptions
from foretoken.lab.train_eagle3.texts import (
    SAMPLING,
    Batches,
    cut,
    encode,
    pick_prompts,
    read_documents,
)
from foretoken.lab.train_eagle3.trainer import Recipe, Target, Trainer
from foretoken.models import TargetView, load_model, load_tokenizer, resolve_checkpoint
from foretoken.models.checkpoint import parse_config, quiet_transformers, read_config, reading
from foretoken.models.eagle3_config import Eagle3Config, read_eagle3_config

_REPORTS = 20  # of a run
_HELD_SHARE = 1 / 32  # of the texts: the head is measured on them, not trained


class Training:
    """One call of the command.

    Args:
        say: gets a line now and then.
        note: gets what has been done so far, which Ctrl-C reports.
    """

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
        target = Target(model.module, model.embedding, model.head, layers)
        if config.draft_vocab_size < config.vocab_size:
            counts = torch.bincount(own_NL.flatten(), minlength=config.vocab_size)
            likeliest = counts.argsort(descending=True, stable=True)[: config.draft_vocab_size]
            target_ids = likeliest.sort().values
        recipe = Recipe(**{name: getattr(options, name) for name in Recipe._fields})
        sample_BT = own_NL[: options.batch_size].long()
        return Trainer(
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
