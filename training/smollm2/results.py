"""Gather the records of a run into `results.json` beside this file.

`python -m training.smollm2.results --hardware "one NVIDIA H100 80GB" --texts DIR --run OUT
--trials DIR --evaluations FILE... --commands FILE`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.tiny_python.results import read, rounded

HERE = Path(__file__).parent
STEPS_SHOWN = 10  # every so many entries of a run's losses


def written(rounds: Sequence[Path]) -> dict[str, Any]:
    """What the shards wrote, in all."""
    rows = [json.loads(line) for path in sorted(rounds) for line in path.read_text().splitlines()]
    return {
        "rounds": len(rows),
        "seeds": sorted(row["seed"] for row in rows),
        "texts": sum(row["texts"] for row in rows),
        "new_tokens": sum(row["new_tokens"] for row in rows),
        "seconds_of_all_shards": sum(row["seconds"] for row in rows),
    }


def run_record(record: dict[str, Any]) -> dict[str, Any]:
    """A run's record with fewer of its losses, its measurements under one name."""
    accepted = {name: value for name, value in record.items() if name.startswith("accepted")}
    kept = {name: value for name, value in record.items() if name not in accepted}
    history = record.get("history", [])
    kept["history"] = [*history[::-STEPS_SHOWN][::-1]]
    kept["drafts_accepted_of_5_on_held_rows"] = {
        name.removeprefix("accepted at "): value for name, value in accepted.items()
    }
    return kept


def trial_record(record: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Of a short trial what differs from the run that was kept, and what came of it."""
    last = [value for name, value in record.items() if name.startswith("accepted")][-1]
    config = record["config"]
    return {
        "differs": {name: value for name, value in config.items() if base.get(name) != value},
        "steps": record["history"][-1]["step"],
        "parameters": record["parameters"],
        "drafts_accepted_of_5_on_held_rows": last,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--commands", type=Path, required=True, help="JSON: a list of commands")
    parser.add_argument("--texts", type=Path, required=True, help="folder with rounds*.jsonl")
    parser.add_argument("--run", type=Path, required=True, help="folder with eagle3.json")
    parser.add_argument("--trials", type=Path, required=True, help="folder with *.json of trials")
    parser.add_argument("--evaluations", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    run = read(args.run / "eagle3.json")
    found = [read(path) for path in args.evaluations]
    rows = [row for record in found for row in record.pop("rows")]
    rows.sort(key=lambda row: (row["temperature"], row["rule"] != "standard", row["k"]))
    trials = sorted(args.trials.glob("*.json"))
    results = {
        "hardware": args.hardware,
        "commands": json.loads(args.commands.read_text()),
        "generation": written([*args.texts.glob("rounds*.jsonl")]),
        "run": run_record(run),
        "trials": {path.stem: trial_record(read(path), run["config"]) for path in trials},
        "evaluation": {**found[0], "rows": rows},
    }
    (HERE / "results.json").write_text(json.dumps(rounded(results), indent=1) + "\n")


if __name__ == "__main__":
    main()
