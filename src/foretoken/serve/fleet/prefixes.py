"""Which replica has seen the beginning of a prompt. No Ray, no torch.

Charter: a memory of prompts by hashes of their beginnings, and the choice of a replica by it. Only
a replica knows what its cache holds; this remembers which replica computed a beginning last.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

CHUNK = 64
"""Characters that are looked up together: the prefix cache has blocks of 16 tokens on a CPU."""
MOST_CHARS = 2**16
"""Characters of a prompt that are looked at."""
_MOST_CHUNKS = 2**18  # chunks remembered of all prompts: 42 MB
_IMBALANCE = 8.0  # requests that a replica may have more than another and still get its prefixes
Id = TypeVar("Id", bound=Hashable)


class PrefixIndex(Generic[Id]):
    """Beginnings of prompts, and for each the replica that computed it last. Not thread-safe.

    Args:
        most: the most chunks that are remembered; the least recently added are forgotten.
    """

    def __init__(self, most: int = _MOST_CHUNKS) -> None:
        self._most, self._seen = most, OrderedDict[bytes, Id]()

    def __len__(self) -> int:
        return len(self._seen)

    def longest(self, prompt: str, among: Collection[Id]) -> tuple[Id | None, int]:
        """The replica of these that has seen the longest beginning of the prompt, and its length in
        chunks; None and 0 if none has seen any."""
        best: tuple[Id | None, int] = (None, 0)
        for number, key in enumerate(_chunks(prompt)):
            replica = self._seen.get(key)
            if replica is None:
                break
            if replica in among:
                best = (replica, number + 1)
        return best

    def add(self, prompt: str, replica: Id) -> None:
        """Remember that this replica computes the prompt."""
        for key in reversed(_chunks(prompt)):  # so that the longest beginnings are forgotten first
            self._seen[key] = replica
            self._seen.move_to_end(key)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def keep(self, replicas: Collection[Id]) -> None:
        """Forget all replicas but these."""
        gone = [key for key, replica in self._seen.items() if replica not in replicas]
        for key in gone:
            del self._seen[key]


def ranked(
    prompt: str, index: PrefixIndex[Id], load: Mapping[Id, int], imbalance: float = _IMBALANCE
) -> Sequence[Id]:
    """Replicas in the order in which a request should go to them.

    The one that has seen most of the prompt comes first, unless it has many more requests than the
    least busy one. The others follow by their number of requests. Ties are broken by a hash of the
    prompt's beginning, so that fronts that do not know of each other choose alike.

    Args:
        load: number of requests of each replica.
        imbalance: how many more requests a replica with the prefix may have.
    """
    start = prompt[:CHUNK].encode("utf-8", "surrogatepass")

    def chance(replica: Id) -> bytes:
        return hashlib.blake2b(start + str(replica).encode(), digest_size=8).digest()

    order = sorted(load, key=lambda replica: (load[replica], chance(replica)))
    favourite, _ = index.longest(prompt, load)
    if favourite is None or load[favourite] - load[order[0]] > imbalance:
        return order
    return [favourite, *(replica for replica in order if replica != favourite)]


def _chunks(prompt: str) -> Sequence[bytes]:
    """A key for each whole chunk, which covers the prompt up to its end; at least one key."""
    text, found, key = prompt[:MOST_CHARS], list[bytes](), b""
    for start in range(0, len(text), CHUNK):
        chunk = text[start : start + CHUNK]
        if len(chunk) < CHUNK and start:
            break
        key = hashlib.blake2b(key + chunk.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        found.append(key)
    return found
