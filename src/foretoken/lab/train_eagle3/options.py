"""Options of `foretoken train-eagle3`: names, defaults, bounds. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from foretoken.config.checks import check_choice, check_int, check_model, check_number
from foretoken.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
LOSSES = ("length", "tv", "kl")


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What `foretoken train-eagle3` trains, on what, and for how long.

    Attributes:
        model: the target: `tiny-python`, a checkpoint folder, or a hub id.
        data: the data file: UTF-8 text, or JSON lines (*.jsonl), each with a `text` or a `prompt`.
        output: folder of the head; its folder `training` holds the state for `resume`.
        steps: number of training steps.
        batch_size: number of texts of a step.
        length: number of tokens of a text.
        unroll: number of consecutive draft steps that every position is trained for.
        learning_rate: the highest learning rate; it rises for 5 % of the steps, then falls as a
            cosine.
        muon_share: the learning rate of Muon, which trains the matrices inside the layer, in units
            of `learning_rate`; 0: AdamW trains all weights.
        loss: `length` (the number of accepted drafts), `tv` (the rate of rejections) or `kl`.
        kl_share: the first steps, up to this share, use the loss `kl` whatever `loss` is.
        num_texts: number of texts that the target writes, at temperatures 1, 0.8 and 0; half of
            each text is a prompt, half the target's answer.
        real_share: share of each batch that is unchanged text of `data`, if `data` has any.
        draft_vocab_size: number of ids that the head drafts, the most frequent ids in its texts;
            None: all.
        intermediate_size: intermediate size of the head's layer; None: the target's.
        tied_head: draft by the target's output layer instead of a separate one.
        fc_norm: norm each hidden state of the target (EAGLE-3.1).
        norm_output: also norm the states that are fed back to the next step (EAGLE-3.1).
        device: `auto` takes a GPU if there is one.
        dtype: dtype of products: `auto` is bfloat16 on a GPU and float32 on a CPU.
        seed: seed of weights, texts and batches.
        save_every: number of steps between checkpoints.
        resume: continue from the last checkpoint in `output` with its options. Other options may be
            left out; an option with another value is an error.
    """

    model: str = "tiny-python"
    data: str = ""
    output: str = ""
    steps: int = 2000
    batch_size: int = 8
    length: int = 512
    unroll: int = 5
    learning_rate: float = 1e-3
    muon_share: float = 0.0
    loss: str = "length"
    kl_share: float = 0.3
    num_texts: int = 4096
    real_share: float = 0.2
    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    tied_head: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    save_every: int = 500
    resume: bool = False

    def __post_init__(self) -> None:
        check_model("model", self.model)
        for name in ("output",) if self.resume else ("output", "data"):
            if not getattr(self, name):
                raise ConfigError(name, getattr(self, name), "a path", f"Give `--{name}`.")
        for name in ("steps", "batch_size", "save_every"):
            check_int(name, getattr(self, name), 1)
        check_int("num_texts", self.num_texts, 2, remedy="One text is kept for measuring.")
        check_int("unroll", self.unroll, 1, 16)
        check_int("length", self.length, 2 * self.unroll + 2, remedy="It depends on `unroll`.")
        check_int("seed", self.seed, 0, 2**63 - 1)
        check_number("learning_rate", self.learning_rate, 1e-8, 1.0)
        check_number("muon_share", self.muon_share, 0.0, 100.0)
        for name in ("kl_share", "real_share"):
            check_number(name, getattr(self, name), 0.0, 1.0)
        check_choice("loss", self.loss, LOSSES)
        check_choice("device", self.device, DEVICES)
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        for name in ("draft_vocab_size", "intermediate_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if self.tied_head and self.draft_vocab_size is not None:
            remedy = "The target's output layer has all ids."
            raise ConfigError("tied_head", True, "left out with `draft_vocab_size`", remedy)

    def to_resume(self) -> dict[str, Any]:
        """The options that a resumed training must not change, by name."""
        may_change = ("device", "output", "resume", "save_every")
        return {name: value for name, value in asdict(self).items() if name not in may_change}

    def resumed(self, begun: Mapping[str, Any]) -> TrainOptions:
        """These options with those of a begun training; `ConfigError`: an option contradicts it."""
        defaults = {field.name: field.default for field in fields(self)}
        begun = {**{name: defaults[name] for name in self.to_resume()}, **begun}
        for name, value in self.to_resume().items():
            if value not in (defaults[name], begun[name]):
                bound = f"{begun[name]!r}, with which the training was begun, or left out"
                raise ConfigError(name, value, bound, "Another `output` begins another training.")
        return replace(self, **begun)
