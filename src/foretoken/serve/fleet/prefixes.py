"""The choice of a replica by the prompts that replicas have computed.

The index does not know whether a replica's cache still holds a prompt's beginning.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

CHUNK = 64  # characters, about as long as the 16 tokens of a block of the cache
MAX_CHARS = 2**16  # of a prompt that the index reads
_MAX_CHUNKS = 2**18  # of all prompts: 42 MB
_IMBALANCE = 8.0
Id = TypeVar("Id", bound=Hashable)


class PrefixIndex(Generic[Id]):
    """Maps each beginning of a prompt to the replica that computed it last. Not thread-safe.

    Args:
        max_chunks: the largest number of chunks; beyond it the oldest chunks are removed.
    """

    def __init__(self, max_chunks: int = _MAX_CHUNKS) -> None:
        self._max_chunks, self._replicas = max_chunks, OrderedDict[bytes, Id]()

    def __len__(self) -> int:
        return len(self._replicas)

    def longest_match(self, prompt: str, replicas: Collection[Id]) -> tuple[Id | None, int]:
        """Which of `replicas` has computed the longest beginning of a prompt, and its length.

        The length is in chunks. If no replica has computed a beginning, the result is None and 0.
        """
        best: tuple[Id | None, int] = (None, 0)
        for index, key in enumerate(_chunk_keys(prompt)):
            replica = self._replicas.get(key)
            if replica is None:
                break
            if replica in replicas:
                best = (replica, index + 1)
        return best

    def add(self, prompt: str, replica: Id) -> None:
        # In reverse order, so that longer beginnings are removed before shorter ones.
        for key in reversed(_chunk_keys(prompt)):
            self._replicas[key] = replica
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_chunks:
            self._replicas.popitem(last=False)

    def keep_only(self, replicas: Collection[Id]) -> None:
        """Forget all replicas but these."""
        forgotten = [key for key, replica in self._replicas.items() if replica not in replicas]
        for key in forgotten:
            del self._replicas[key]


def rank_replicas(
    prompt: str, index: PrefixIndex[Id], load: Mapping[Id, int], imbalance: float = _IMBALANCE
) -> Sequence[Id]:
    """The replicas in the order in which to try them for a request.

    The replica that has computed most of the prompt comes first, if its load is at most that of the
    least busy replica plus `imbalance`. The other replicas follow by their load. Ties are broken by
    a hash of the prompt's beginning, so that independent fronts make the same choice.

    Args:
        load: the number of requests of each replica.
    """
    start = prompt[:CHUNK].encode("utf-8", "surrogatepass")

    def tie_breaker(replica: Id) -> bytes:
        return hashlib.blake2b(start + str(replica).encode(), digest_size=8).digest()

    order = sorted(load, key=lambda replica: (load[replica], tie_breaker(replica)))
    favourite, _ = index.longest_match(prompt, load)
    if favourite is None or load[favourite] - load[order[0]] > imbalance:
        return order
    return [favourite, *(replica for replica in order if replica != favourite)]


def _chunk_keys(prompt: str) -> Sequence[bytes]:
    """Hashes of the prompt up to each whole chunk's end; a prompt below one chunk has one hash."""
    text, keys, key = prompt[:MAX_CHARS], list[bytes](), b""
    for start in range(0, len(text), CHUNK):
        chunk = text[start : start + CHUNK]
        if len(chunk) < CHUNK and start:
            break
        key = hashlib.blake2b(key + chunk.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        keys.append(key)
    return keys
