"""T=0 texts of small models of many families, in float32, against Transformers' own logits.

Each token must be the argmax of Transformers' logits for the text before it. A token with a logit
within 1e-3 of the largest is a near-tie. With prompt lookup the texts must be the same.

    python -m tests.models.compare_families --device cuda --output benchmarks/results
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, collect, write
from tests.models import families

NAMES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2",
    "starcoder2", "cohere2", "granite", "smollm3", "glm4", "gpt_oss", "qwen3_moe", "mixtral",
    "exaone4", "opt", "gpt_neox",
)  # fmt: skip
WIDE = {
    "hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": 96,
}  # fmt: skip
LENGTHS = (3, 17, 40, 29)  # of prompts
NEAR = 1e-3
SPECULATION = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}


def compare(name: str, folder: Path, device: str) -> Row:
    """One family; heads are 64 wide, so that they take the kernels that real ones take."""
    narrow = {k: 64 for k in ("head_dim", "query_pre_attn_scalar") if k in families.SUPPORTED[name]}
    families.save_model(folder, name, {**families.SUPPORTED[name], **WIDE, **narrow})
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 90, (n,), generator=generator).tolist() for n in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    texts, labels = [], dict[str, Any]()
    for speculation in (None, SPECULATION):
        llm = LLM(
            str(folder), speculation, device=device, dtype="float32", max_model_len=128,
            num_blocks=64, block_size=16, max_num_seqs=4,
        )  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        texts.append([output.outputs[0].token_ids for output in outputs])
        runner = llm.engine.runner
        labels = {"fused": runner.model.runs_in_kernels, "graphs": bool(runner.graphs.sizes)}
    plain, equal, ties = families.plain_model(folder).to(device), 0, 0
    for prompt, text in zip(prompts, texts[0], strict=True):
        with torch.inference_mode():
            logits = plain(torch.tensor([prompt + text], device=device)).logits[0].float()
        rows = logits[len(prompt) - 1 : -1]
        gaps = rows.amax(dim=1) - rows[torch.arange(len(text)), torch.tensor(text)]
        equal += not bool((gaps > 0).any())
        ties += bool((gaps > 0).any()) and not bool((gaps > NEAR).any())
    values = {
        "texts": len(prompts),
        "equal_to_transformers": equal,
        "near_ties": ties,
        "speculative_equal_to_plain": sum(a == b for a, b in zip(*texts, strict=True)),
    }
    return Row(name, {"family": name, **labels}, values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--families", default=",".join(NAMES))
    parser.add_argument("--output", type=Path, default=None, help="a folder")
    args = parser.parse_args()
    rows = []
    for name in args.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(name, Path(folder), args.device))
        print(name, rows[-1].values, flush=True)
    if args.output is not None:
        command = f"python -m tests.models.compare_families {' '.join(sys.argv[1:])}"
        kind = "gpu_families" if args.device != "cpu" else "families"
        write(collect(kind, command, {**WIDE, "head_size": 64}, rows), args.output)
    return int(any(r.values["equal_to_transformers"] != r.values["texts"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
