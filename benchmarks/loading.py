"""How long a model's weights take from files to a checked model, and how much memory, side by side.

    python -m benchmarks.loading --before ../before/src --device cuda
    python -m benchmarks.loading --shape qwen3-0.6b --dtype float32

The checkpoint has random weights of a shape's sizes and lies in a temporary folder. Each load is
a process of its own, versions take turns, and all files were read just before: what is timed is
the page cache, not a disk. Only names that all versions share are used here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, arguments, progress, record

SHAPES = ROOT / "benchmarks" / "shapes"
FILE_BYTES = 4 << 30


def write_checkpoint(shape: Path, folder: Path) -> None:
    """A checkpoint of bfloat16 weights in several files, as hubs have them."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text((shape / "config.json").read_text())
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    files: list[dict[str, Any]] = [{}]
    for name, parameter in module.named_parameters():
        if sum(map(_bytes, files[-1].values())) > FILE_BYTES:
            files.append({})
        files[-1][name] = parameter
    index: dict[str, str] = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for number, file in enumerate(progress(files, "writing")):
        tensors = {name: _random(p.shape, "norm" in name, device) for name, p in file.items()}
        path = folder / f"model-{number:05}.safetensors"
        save_file(tensors, path, {"format": "pt"})
        index |= dict.fromkeys(file, path.name)
    described = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(described))


def _bytes(tensor: Any) -> int:
    return int(tensor.nbytes)


def _random(shape: Any, is_norm: bool, device: str) -> Any:
    import torch

    if is_norm:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.02).cpu()


def child(folder: Path, device: str, dtype: str) -> dict[str, float]:
    """Load once, in this process."""
    start = time.perf_counter()
    import torch

    from foretoken.models import load_model

    imported = time.perf_counter()
    on_gpu = device != "cpu"
    if on_gpu:
        torch.zeros(1, device=device)
    before = time.perf_counter()
    backend = "triton" if on_gpu else "native"
    load_model(folder, device=device, dtype=dtype, backend=backend, max_model_len=2048)
    if on_gpu:
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return {
        "import": imported - start,
        "load": time.perf_counter() - before,
        "gpu_peak": peak,
        "host_peak": _most_resident(),
    }


def _most_resident() -> float:
    """GiB; of this process alone, where `getrusage` also counts what its parent was."""
    [kib] = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) / 2**20


def load(src: Path, words: list[str]) -> dict[str, float]:
    """Load once with the code in `src`, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(src.resolve()), str(ROOT)])}
    command = [sys.executable, "-m", "benchmarks.loading", *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure the versions in turns; the first load of each fills the page cache."""
    from foretoken.lab.results import Row, Spread

    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--before", type=Path, help="`src` of an older version to compare with")
    parser.add_argument("--shape", default="llama-3.1-8b", help="a folder of benchmarks/shapes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept for further runs")
    parser.add_argument("--child", type=Path, help="what its processes are told")
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(child(options.child, options.device, options.dtype)))
        return
    sources = {"this version": ROOT / "src"}
    if options.before is not None:
        sources["the older one"] = options.before
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        shape, kept = SHAPES / options.shape, folder / "config.json"
        if not kept.exists():
            write_checkpoint(shape, folder)
        elif kept.read_text() != (shape / "config.json").read_text():
            parser.error(f"--folder: {folder} has a checkpoint of another shape")
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**30
        words = ["--child", str(folder), "--device", options.device, "--dtype", options.dtype]
        for repeat in progress(range(options.repeats + 1), "loading"):
            turn = sources if repeat % 2 else dict(reversed(sources.items()))
            for version, src in turn.items():
                measured = load(src, words)
                if repeat:
                    found[version].append(measured)
    units = {"import": "s", "load": "s", "gpu_peak": "GiB", "host_peak": "GiB"}
    rows = []
    for version, loads in found.items():
        values: dict[str, Any] = {}
        for what, unit in units.items():
            values[what] = Spread.of([one[what] for one in loads], unit)
        rows.append(Row(version, {"version": version}, values))
        print(version, {name: round(value.median, 2) for name, value in values.items()})
    shapes = {"shape": options.shape, "dtype": options.dtype, "weights_gib": round(weights, 2)}
    notes = [
        "load: from files in the page cache to a model that passed its checks; import is not in "
        "it. Weights in files are bfloat16. host_peak: resident memory, mapped files included."
    ]
    record("loading", options, shapes, rows, notes)


if __name__ == "__main__":
    main()
