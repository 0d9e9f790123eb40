"""Which replica has seen the beginning of a prompt. No Ray, no torch.

Charter: an index of prompts by hashes of their beginnings, and the choice of a replica with this
index. Only a replica knows what its cache holds; the index knows which replica computed a beginning
last.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

CHUNK = 64
"""Characters that the index looks up together. On a CPU the cache has blocks of 16 tokens."""
MOST_CHARS = 2**16
"""The most characters of a prompt that the index reads."""
_MOST_CHUNKS = 2**18  # chunks of all prompts in an index: 42 MB
_IMBALANCE = 8.0  # the default of `imbalance` in `ranked`
Id = TypeVar("Id", bound=Hashable)


class PrefixIndex(Generic[Id]):
    """For each beginning of a prompt the replica that computed it last. Not thread-safe.

    Args:
        max_chunks: the most chunks in the index; the least recently added are removed.
    """

    def __init__(self, max_chunks: int = _MOST_CHUNKS) -> None:
        self._max_chunks, self._replicas = max_chunks, OrderedDict[bytes, Id]()

    def __len__(self) -> int:
        return len(self._replicas)

    def longest(self, prompt: str, among: Collection[Id]) -> tuple[Id | None, int]:
        """The replica that has seen the longest beginning of a prompt, and its length in chunks.

        None and 0 if no replica in `among` has seen a beginning.

        Args:
            among: the replicas to choose from.
        """
        best: tuple[Id | None, int] = (None, 0)
        for number, key in enumerate(_chunk_keys(prompt)):
            replica = self._replicas.get(key)
            if replica is None:
                break
            if replica in among:
                best = (replica, number + 1)
        return best

    def add(self, prompt: str, replica: Id) -> None:
        """Remember that this replica computes the prompt."""
        # In reverse order, so that longer beginnings are removed before shorter ones.
        for key in reversed(_chunk_keys(prompt)):
            self._replicas[key] = replica
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_chunks:
            self._replicas.popitem(last=False)

    def keep(self, replicas: Collection[Id]) -> None:
        """Remove the beginnings of all other replicas."""
        forgotten = [key for key, replica in self._replicas.items() if replica not in replicas]
        for key in forgotten:
            del self._replicas[key]


def ranked(
    prompt: str, index: PrefixIndex[Id], load: Mapping[Id, int], imbalance: float = _IMBALANCE
) -> Sequence[Id]:
    """The replicas in the order in which to try them for a request.

    The replica that has seen most of the prompt comes first, unless it has many more requests than
    the least busy replica. The other replicas follow by their number of requests. Ties are broken
    by a hash of the prompt's beginning, so that independent fronts make the same choice.

    Args:
        load: the number of requests of each replica.
        imbalance: how many requests more than the least busy replica the first one may have.
    """
    start = prompt[:CHUNK].encode("utf-8", "surrogatepass")

    def tie_breaker(replica: Id) -> bytes:
        return hashlib.blake2b(start + str(replica).encode(), digest_size=8).digest()

    order = sorted(load, key=lambda replica: (load[replica], tie_breaker(replica)))
    favourite, _ = index.longest(prompt, load)
    if favourite is None or load[favourite] - load[order[0]] > imbalance:
        return order
    return [favourite, *(replica for replica in order if replica != favourite)]


def _chunk_keys(prompt: str) -> Sequence[bytes]:
    """A key for each whole chunk of a prompt, a hash of the prompt up to the chunk's end.

    A prompt shorter than a chunk has one key.
    """
    text, keys, key = prompt[:MOST_CHARS], list[bytes](), b""
    for start in range(0, len(text), CHUNK):
        chunk = text[start : start + CHUNK]
        if len(chunk) < CHUNK and start:
            break
        key = hashlib.blake2b(key + chunk.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        keys.append(key)
    return keys
