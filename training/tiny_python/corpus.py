"""Build the corpus: collect, filter, dedupe, split by file, write.

Sources: the standard library of the running interpreter and installed packages under permissive
licences. `python -m training.tiny_python.corpus --out .corpus`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import platform
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

from training.tiny_python.neardup import SeenShingles, drop_near_duplicates

# distribution -> (import folders or files, licence as its metadata states it)
PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "transformers": (("transformers",), "Apache-2.0"),
    "torch": (("torch", "torchgen", "functorch"), "BSD-3-Clause (with Apache-2.0, MIT, BSL parts)"),
    "sympy": (("sympy",), "BSD-3-Clause"),
    "numpy": (("numpy",), "BSD-3-Clause"),
    "networkx": (("networkx",), "BSD-3-Clause"),
    "pip": (("pip",), "MIT"),
    "mypy": (("mypy", "mypyc"), "MIT"),
    "pygments": (("pygments",), "BSD-2-Clause"),
    "huggingface_hub": (("huggingface_hub",), "Apache-2.0"),
    "setuptools": (("setuptools", "pkg_resources", "_distutils_hack"), "MIT"),
    "mpmath": (("mpmath",), "BSD-3-Clause"),
    "pydantic": (("pydantic",), "MIT"),
    "pydantic_core": (("pydantic_core",), "MIT"),
    "pytest": (("_pytest", "pytest"), "MIT"),
    "rich": (("rich",), "MIT"),
    "fsspec": (("fsspec",), "BSD-3-Clause"),
    "filelock": (("filelock",), "MIT"),
    "anyio": (("anyio",), "MIT"),
    "jinja2": (("jinja2",), "BSD-3-Clause"),
    "packaging": (("packaging",), "Apache-2.0 OR BSD-2-Clause"),
    "click": (("click",), "BSD-3-Clause"),
    "typer": (("typer",), "MIT"),
    "httpx2": (("httpx2",), "BSD-3-Clause"),
    "httpcore2": (("httpcore2",), "BSD-3-Clause"),
    "markdown-it-py": (("markdown_it",), "MIT"),
    "pyyaml": (("yaml",), "MIT"),
    "typing_extensions": (("typing_extensions.py",), "PSF-2.0"),
    "typing_inspection": (("typing_inspection",), "MIT"),
    "annotated_types": (("annotated_types",), "MIT"),
    "safetensors": (("safetensors",), "Apache-2.0"),
    "tokenizers": (("tokenizers",), "Apache-2.0"),
    "sortedcontainers": (("sortedcontainers",), "Apache-2.0"),
    "pluggy": (("pluggy",), "MIT"),
    "h11": (("h11",), "MIT"),
    "idna": (("idna",), "BSD-3-Clause"),
    "truststore": (("truststore",), "MIT"),
    "markupsafe": (("markupsafe",), "BSD-3-Clause"),
    "shellingham": (("shellingham",), "ISC"),
    "iniconfig": (("iniconfig",), "MIT"),
    "mdurl": (("mdurl",), "MIT"),
}
STDLIB = "cpython-stdlib"
# Packages that would dominate the mixture: bytes kept, files taken in hash order.
BYTE_CAPS = {"transformers": 30_000_000, "torch": 32_000_000, "sympy": 18_000_000}
SKIPPED_FOLDERS = {"_vendor", "vendored", "site-packages", "__pycache__", "third_party", "extern"}
FOREIGN_LICENCE = re.compile(
    r"general public license|\bL?GPL|mozilla public|non-?commercial|creative commons", re.IGNORECASE
)
MAX_FILE_BYTES = 400_000
HELDOUT_SHARE = 0.03
TRAIN_OVERLAP_LIMIT = 0.7
HELDOUT_OVERLAP_LIMIT = 0.5


@dataclass(frozen=True)
class SourceFile:
    """One Python file: `key` is `package/relative/path`, never a path of the machine."""

    package: str
    key: str
    text: str


def unit_hash(key: str) -> float:
    """A stable number in [0, 1) from a file's key; decides its order and its split."""
    return int.from_bytes(blake2b(key.encode(), digest_size=6).digest(), "big") / 2**48


def looks_like_code(text: str) -> bool:
    """False for tables, generated data and files with too little text.

    Rejects a mean line above 90 characters, a line above 1 500, or more than 20% digits.
    """
    lines = text.splitlines()
    if len(text) < 200 or len(lines) < 8 or len(text.encode()) > MAX_FILE_BYTES:
        return False
    if max(map(len, lines)) > 1_500 or len(text) / len(lines) > 90:
        return False
    digits = sum(c.isdigit() for c in text)
    escapes = text.count("\\x") + text.count("\\u") + text.count("0x")
    letters = sum(c.isascii() and c.isalpha() for c in text)
    return digits < 0.20 * len(text) and escapes < 0.02 * len(text) and letters > 0.3 * len(text)


def python_files(root: Path) -> Iterator[Path]:
    """Python files under `root` (or `root` itself), sorted, without vendored folders."""
    if root.is_file():
        yield root
        return
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            yield path


def read_source(package: str, key: str, path: Path) -> SourceFile | None:
    """The file as UTF-8 text, or None when it is not usable training text."""
    try:
        text = path.read_text("utf-8").replace("\r\n", "\n")
    except (UnicodeDecodeError, OSError):
        return None
    if not looks_like_code(text) or FOREIGN_LICENCE.search(text[:4_000]):
        return None
    return SourceFile(package, key, text)


def collect() -> list[SourceFile]:
    """Every usable file of every source, exact duplicates dropped, in hash order."""
    paths = sysconfig.get_paths()
    found: list[SourceFile] = []
    stdlib = Path(paths["stdlib"])
    for path in python_files(stdlib):
        key = f"{STDLIB}/{path.relative_to(stdlib).as_posix()}"
        if source := read_source(STDLIB, key, path):
            found.append(source)
    site = Path(paths["purelib"])
    for package, (folders, _) in PACKAGES.items():
        for folder in folders:
            for path in python_files(site / folder) if (site / folder).exists() else ():
                key = f"{package}/{path.relative_to(site).as_posix()}"
                if source := read_source(package, key, path):
                    found.append(source)
    found.sort(key=lambda f: unit_hash(f.key))
    unique: dict[bytes, SourceFile] = {}
    for source in found:
        unique.setdefault(blake2b(source.text.strip().encode()).digest(), source)
    return list(unique.values())


def split(files: list[SourceFile]) -> tuple[list[SourceFile], list[SourceFile]]:
    """(train, held-out) by file hash, near-duplicates removed, caps applied to train."""
    by_key = {f.key: f for f in files}
    heldout = [f for f in files if unit_hash(f.key) < HELDOUT_SHARE]
    spent: Counter[str] = Counter()
    seen = SeenShingles()
    train: list[SourceFile] = []
    for source in (f for f in files if unit_hash(f.key) >= HELDOUT_SHARE):
        size = len(source.text.encode())
        if spent[source.package] + size > BYTE_CAPS.get(source.package, 10**12):
            continue
        if drop_near_duplicates([(source.key, source.text)], seen, TRAIN_OVERLAP_LIMIT, grow=True):
            spent[source.package] += size
            train.append(source)
    # Grown while it runs: held-out files must not repeat each other either.
    keys = drop_near_duplicates(
        [(f.key, f.text) for f in heldout], seen, HELDOUT_OVERLAP_LIMIT, grow=True
    )
    return train, [by_key[k] for k in keys]


def manifest(train: list[SourceFile], heldout: list[SourceFile]) -> dict[str, object]:
    """Packages, versions, licences, files and bytes of both splits, and the held-out files."""
    rows: dict[str, dict[str, object]] = {}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, files in (("train", train), ("heldout", heldout)):
        for source in files:
            counts[source.package][f"{name}_files"] += 1
            counts[source.package][f"{name}_bytes"] += len(source.text.encode())
    for package, count in sorted(counts.items()):
        stdlib = package == STDLIB
        rows[package] = {
            "version": platform.python_version() if stdlib else metadata.version(package),
            "licence": "PSF-2.0" if stdlib else PACKAGES[package][1],
            **count,
        }
    total: Counter[str] = sum(counts.values(), Counter())
    return {"packages": rows, "total": dict(total), "heldout_files": sorted(f.key for f in heldout)}


def write_split(path: Path, files: list[SourceFile]) -> None:
    """One JSON object per line, xz-compressed."""
    with lzma.open(path, "wt", encoding="utf-8", preset=3) as out:
        for f in files:
            row = {"package": f.package, "key": f.key, "text": f.text}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_split(path: Path) -> list[SourceFile]:
    """The inverse of `write_split`."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [SourceFile(**json.loads(line)) for line in lines]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".corpus"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train, heldout = split(collect())
    write_split(args.out / "train.jsonl.xz", train)
    write_split(args.out / "heldout.jsonl.xz", heldout)
    info = manifest(train, heldout)
    (args.out / "manifest.json").write_text(json.dumps(info, indent=1) + "\n")
    print(json.dumps(info["total"]))


if __name__ == "__main__":
    main()
