"""Near-duplicate detection, filters and the split."""

from training.tiny_python.corpus import HELDOUT_SHARE, SourceFile, looks_like_code, split, unit_hash
from training.tiny_python.neardup import SeenShingles, drop_near_duplicates, overlap, shingles


def program(name: str, lines: int = 60) -> str:
    return "\n".join(f"    value_{name}_{i} = compute_{name}({i}, other)" for i in range(lines))


def test_shingles_count_runs() -> None:
    assert len(shingles(["a", "b", "c"], 2)) == 2
    assert len(shingles(["a"], 2)) == 1
    assert shingles([], 2) == set()


def test_overlap_of_nothing_is_zero() -> None:
    assert overlap(set(), {1}) == 0.0


def test_reindented_copy_is_a_near_duplicate() -> None:
    seen = SeenShingles()
    seen.add(program("x"))
    copy = "\n".join("    " + line for line in program("x").splitlines())
    assert seen.overlap(copy) == 1.0
    assert seen.overlap(program("y")) < 0.1


def test_growing_filter_keeps_the_first_copy() -> None:
    texts = [("a", program("x")), ("b", program("x")), ("c", program("z"))]
    assert drop_near_duplicates(texts, SeenShingles(), 0.5, grow=True) == ["a", "c"]


def test_split_is_by_file_and_drops_copies_of_training_text() -> None:
    files = [SourceFile("p", f"p/{i}.py", program(f"n{i}")) for i in range(300)]
    held = next(f for f in files if unit_hash(f.key) < HELDOUT_SHARE)
    kept = next(f for f in files if unit_hash(f.key) >= HELDOUT_SHARE)
    files[files.index(held)] = SourceFile("p", held.key, kept.text + "\n# tail")
    train, heldout = split(files)
    assert not {f.key for f in train} & {f.key for f in heldout}
    assert held.key not in {f.key for f in heldout}
    assert all(unit_hash(f.key) < HELDOUT_SHARE for f in heldout)


def test_tables_are_not_code() -> None:
    assert looks_like_code(program("x"))
    assert not looks_like_code("\n".join("0x1f, 0x2e, 123, 456, 789," for _ in range(100)))
    assert not looks_like_code("x = 1\n")
