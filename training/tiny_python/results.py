"""Gather the run's records into `results.json` beside this file.

`python -m training.tiny_python.results --hardware "NVIDIA H200"`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from training.tiny_python.export import ASSETS

HERE = Path(__file__).parent


def read(path: Path) -> Any:
    """A JSON file, or None when that stage was not run."""
    return json.loads(path.read_text()) if path.exists() else None


def rounded(value: Any) -> Any:
    """Floats to four significant places after the point, everything else as it is."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--runs", type=Path, default=Path(".corpus/runs"))
    parser.add_argument("--shipped", default="draft-2x192")
    parser.add_argument("--hardware", required=True)
    args = parser.parse_args()
    manifest = read(args.corpus / "manifest.json")
    results = {
        "hardware": args.hardware,
        "shipped_draft": args.shipped,
        "bytes": {
            folder.name: sum(f.stat().st_size for f in folder.iterdir())
            for folder in sorted(ASSETS.glob("tiny-python*"))
        },
        "corpus": manifest["total"],
        "pretrain": read(args.runs / "target" / "pretrain.json"),
        "distill": read(args.runs / "distill.json"),
        "evaluate": read(args.runs / "evaluate.json"),
        "freerun": read(args.runs / "freerun.json"),
        "draft_cost": read(args.runs / "draft_cost.json"),
    }
    (HERE / "results.json").write_text(json.dumps(rounded(results), indent=1) + "\n")
    (HERE / "corpus_manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
