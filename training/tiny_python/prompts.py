"""Choose the held-out prompts that ship beside the target.

`python -m training.tiny_python.prompts --corpus .corpus`. One prompt a file, at most, taken inside
a function body; packages take turns, so no package dominates.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import defaultdict
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.tiny_python.corpus import PACKAGES, STDLIB, SourceFile, read_split, unit_hash
from training.tiny_python.export import ASSETS

PROMPTS = 192
MIN_TOKENS, MAX_TOKENS, REFERENCE_TOKENS = 150, 250, 100


def body_lines(text: str) -> list[int]:
    """Line numbers (1-based) on which a statement inside a function body ends.

    The last statement of a body does not count: the prompt must stop within the body.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    ends: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            ends.update(s.end_lineno for s in node.body[:-1] if s.end_lineno)
    return sorted(ends)


def cut_prompt(text: str, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str] | None:
    """(prompt, reference) of one file, or None when no place fits.

    The prompt is whole lines and ends without a newline: a newline and the indentation behind it
    are one token, which the model should be free to choose. Both parts stay within token limits.
    """
    lines = text.split("\n")
    sizes = [len(ids) for ids in tokenizer([line + "\n" for line in lines])["input_ids"]]
    ends = body_lines(text)
    ends = ends[len(ends) // 3 :] + ends[: len(ends) // 3]  # from a third in, past the imports
    for end in ends:
        if sum(sizes[end : end + 60]) < 1.5 * REFERENCE_TOKENS or lines[end - 1].endswith('"""'):
            continue
        first, total = end, 0
        while first > 0 and total + sizes[first - 1] <= (MIN_TOKENS + MAX_TOKENS) // 2:
            first -= 1
            total += sizes[first]
        while first < end and not lines[first].strip():
            first += 1
        last, after, reference = end, 0, ""
        while after < REFERENCE_TOKENS and last < len(lines):
            last += 1
            reference = "\n" + "\n".join(lines[end:last])
            after = len(tokenizer(reference)["input_ids"])
        prompt = "\n".join(lines[first:end])
        count = len(tokenizer(prompt)["input_ids"])
        if MIN_TOKENS <= count <= MAX_TOKENS and after <= 2 * REFERENCE_TOKENS:
            return prompt, reference
    return None


def choose(
    files: list[SourceFile], tokenizer: PreTrainedTokenizerFast, count: int
) -> list[dict[str, str]]:
    """Up to `count` prompts; packages take turns, files of a package in hash order."""
    queues: dict[str, list[SourceFile]] = defaultdict(list)
    for source in sorted(files, key=lambda f: unit_hash("prompt/" + f.key)):
        queues[source.package].append(source)
    chosen: list[dict[str, str]] = []
    while len(chosen) < count and any(queues.values()):
        for package in sorted(queues):
            while queues[package] and len(chosen) < count:
                source = queues[package].pop(0)
                if cut := cut_prompt(source.text, tokenizer):
                    chosen.append(row(source, *cut, index=len(chosen)))
                    break
    return chosen


def row(source: SourceFile, prompt: str, reference: str, index: int) -> dict[str, str]:
    """One line of `heldout.jsonl`."""
    licence = "PSF-2.0" if source.package == STDLIB else PACKAGES[source.package][1]
    return {
        "id": f"heldout-{index:03d}",
        "package": source.package,
        "file": source.key.split("/", 1)[1],
        "licence": licence,
        "prompt": prompt,
        "reference": reference,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-python" / "heldout.jsonl")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.corpus / "tokenizer")
    rows = choose(read_split(args.corpus / "heldout.jsonl.xz"), tokenizer, PROMPTS)
    args.out.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    print(f"{len(rows)} prompts, {len({r['package'] for r in rows})} packages")


if __name__ == "__main__":
    main()
