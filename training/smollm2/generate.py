"""The texts that the head learns from, written by the target: user turns, answers, further turns.

`python -m training.smollm2.generate --model FOLDER --out DIR --shard 0 --shards 4 --seconds 300`.
Shards run side by side on one GPU; each writes a file a round until its time is over. A user turn
is a template's, or the model's own: it is given the chat up to the word `user` and goes on (Xu et
al. 2024, "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing").
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foretoken import LLM, SamplingParams
from training.smollm2 import prompts

START, END = "<|im_start|>", "<|im_end|>"
USER = f"{END}\n{START}user\n"
ASSISTANT = f"{END}\n{START}assistant\n"

SHARES = {"own": 0.24, "opened": 0.34, "template": 0.36, "raw": 0.06}
"""Of a round's texts: how they begin."""
TEMPERATURES = {0.0: 0.4, 0.8: 0.4, 1.0: 0.2}
"""Of answers, with their shares; user turns are written at 1."""
OTHER_SYSTEM = 0.15
AGAIN = 0.3  # of the answered chats that get a second user turn
TURN_TOKENS, ANSWER_TOKENS, MAX_LEN = 120, 448, 1152


@dataclass
class Text:
    """One text as it grows.

    temperature: of its answers
    is_chat: False: raw text, one answer and no turns
    asked: the user turns, for what must not be there twice
    """

    ids: list[int]
    temperature: float
    is_chat: bool = True
    asked: list[str] = field(default_factory=list)


def begin_texts(
    tokenizer: Any, count: int, seed: int
) -> tuple[list[Text], list[tuple[Text, list[int]]]]:
    """A round's texts: those that wait for an answer, and those whose user turn the model writes,
    each with its first words."""
    rng = random.Random(seed)
    templates, raws = prompts.template_prompts(seed), prompts.raw_starts(seed)
    answered, turning = list[Text](), list[tuple[Text, list[int]]]()
    for kind in rng.choices([*SHARES], [*SHARES.values()], k=count):
        [temperature] = rng.choices([*TEMPERATURES], [*TEMPERATURES.values()])
        if kind == "raw":
            ids = tokenizer.encode(next(raws), add_special_tokens=False)
            answered.append(Text(ids, max(temperature, 0.8), is_chat=False))
            continue
        is_other = rng.random() < OTHER_SYSTEM
        system = rng.choice(prompts.SYSTEMS) if is_other else prompts.DEFAULT_SYSTEM
        head = f"{START}system\n{system}{USER}"
        if kind == "template":
            asked = next(templates)
            ids = tokenizer.encode(head + asked + ASSISTANT, add_special_tokens=False)
            answered.append(Text(ids, temperature, asked=[asked]))
        else:
            opening = rng.choice(prompts.OPENINGS) if kind == "opened" else ""
            text = Text(tokenizer.encode(head, add_special_tokens=False), temperature)
            turning.append((text, tokenizer.encode(opening, add_special_tokens=False)))
    return answered, turning


class Writer:
    """The engine, and what it is asked for."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self._llm, self.tokens = llm, 0
        tokenizer: Any = llm.tokenizer
        self.tokenizer = tokenizer
        self._seeds = itertools.count(seed << 32)
        self._end, self._assistant, self._user = (
            tokenizer.encode(text, add_special_tokens=False) for text in (END, ASSISTANT, USER)
        )

    def _write(
        self, given: Sequence[list[int]], temperatures: Sequence[float], most: int
    ) -> list[tuple[list[int], bool]]:
        """What the target adds to each, and whether it ended by itself."""
        params = [
            SamplingParams(
                temperature=t,
                max_tokens=min(most, MAX_LEN - len(ids)),
                seed=next(self._seeds),
                detokenize=False,
            )
            for t, ids in zip(temperatures, given, strict=True)
        ]
        outputs = self._llm.generate(list(given), params)
        found = []
        for output in outputs:
            [one] = output.outputs
            self.tokens += len(one.token_ids)
            ids = list(one.token_ids)
            if has_ended := one.finish_reason == "stop" and ids[-1:] == self._end:
                ids.pop()
            found.append((ids, has_ended))
        return found

    def turns(self, turning: Sequence[tuple[Text, list[int]]]) -> list[Text]:
        """Let the model write user turns at temperature 1; those that end, ready for an answer."""
        given = [[*text.ids, *opening] for text, opening in turning]
        done = []
        for (text, opening), (ids, has_ended) in zip(
            turning, self._write(given, [1.0] * len(given), TURN_TOKENS), strict=True
        ):
            asked = self.tokenizer.decode([*opening, *ids]).strip()
            if has_ended and len(asked) > 9 and START not in asked:
                text.ids += [*opening, *ids, *self._assistant]
                text.asked.append(asked)
                done.append(text)
        return done

    def answers(self, texts: Sequence[Text]) -> list[Text]:
        """Let the model answer; the chats whose answer ended."""
        temperatures = [text.temperature for text in texts]
        ended = []
        written = self._write([text.ids for text in texts], temperatures, ANSWER_TOKENS)
        for text, (ids, has_ended) in zip(texts, written, strict=True):
            text.ids += ids
            if has_ended and text.is_chat:
                ended.append(text)
            elif has_ended:
                text.ids += self._end
        return ended

    def round(self, count: int, seed: int) -> list[Text]:
        """Texts of one round."""
        waiting, turning = begin_texts(self.tokenizer, count, seed)
        texts = waiting + self.turns(turning)
        ended = self.answers(texts)
        again = ended[: int(len(ended) * AGAIN)]
        for text in ended[len(again) :]:
            text.ids += self._end
        for text in again:
            text.ids += self._user
        answered = self.turns([(text, []) for text in again if len(text.ids) < MAX_LEN // 2])
        for text in self.answers(answered):
            text.ids += self._end
        return texts


def store(path: Path, texts: Sequence[Text]) -> None:
    """Write the texts: their ids in one run, their lengths, temperatures and user turns."""
    ids = torch.tensor([i for text in texts for i in text.ids], dtype=torch.int32)
    sizes = torch.tensor([len(text.ids) for text in texts], dtype=torch.int32)
    temperature = torch.tensor([text.temperature for text in texts])
    asked = json.dumps([text.asked for text in texts])
    tensors = {"ids": ids, "sizes": sizes, "temperature": temperature}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, {"asked": asked})
    partial.rename(path)


def main() -> None:
    """Command line."""
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--count", type=int, default=3000, help="texts of a round")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--kv-cache-gib", type=float, default=8.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    engine: dict[str, Any] = {
        "max_model_len": MAX_LEN, "max_num_seqs": args.max_num_seqs,
        "kv_cache_gib": args.kv_cache_gib, "max_num_batched_tokens": 8192,
    }  # fmt: skip
    with LLM(args.model, **engine) as llm:
        ready, slowest = time.time(), 0.0
        for number in range(args.rounds):
            seed = args.seed + number * args.shards + args.shard
            writer, started = Writer(llm, seed), time.time()
            texts = writer.round(args.count, seed)
            store(args.out / f"texts-{args.seed}-{args.shard:02d}-{number:03d}.safetensors", texts)
            now = time.time()
            slowest = max(slowest, now - started)
            row = {"shard": args.shard, "round": number, "seed": seed, "texts": len(texts),
                   "new_tokens": writer.tokens, "seconds": round(now - started, 1),
                   "start_seconds": round(ready - began, 1)}  # fmt: skip
            print(json.dumps(row), flush=True)
            with (args.out / f"rounds-{args.seed}-{args.shard:02d}.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
            if now - began + slowest > args.seconds:
                break


if __name__ == "__main__":
    main()
