"""Ray Serve's interface for choosing a replica, by the prefixes that each has seen.

Charter: only the conversion from and to Ray's types; `prefixes.py` makes the choice. A router
belongs to one handle, and runs in this handle's event loop.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from foretoken.serve.fleet.prefixes import PrefixIndex, ranked

_UNSENT_S = 2.0
"""Seconds after which a request counts as gone, if it was not sent to its replica."""


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that has computed the longest beginning of its prompt.

    The prompt is that of an argument with an attribute `prompt`, as in Ray's
    `PrefixCacheAffinityRouter`. A request without a prompt goes to the least busy replica. Ray's
    router calls an actor three times per request; this router has its own index
    (docs/decisions/023).
    """

    def initialize_state(self, **options: Any) -> None:
        """Take `request_router_kwargs`, which may have `imbalance`: see `ranked`."""
        self._options = options
        self._index = PrefixIndex[str]()
        self._unsent = dict[str, tuple[float, str]]()  # by request: time, chosen replica
        self._open = dict[str, str]()  # by request: the replica that has it

    async def choose_replicas(
        self,
        candidate_replicas: Sequence[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All replicas in the order in which to try them; Ray wants each in a list of its own."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not replicas:
            return []
        prompt = _prompt(pending_request)
        order = ranked(prompt, self._index, self._load(replicas), **self._options)
        # The index learns of the choice now, since Ray chooses for all waiting requests before it
        # sends the first of them.
        if prompt:
            self._index.add(prompt, order[0])
        if pending_request is not None:
            request = pending_request.metadata.internal_request_id
            self._unsent[request] = time.monotonic(), order[0]
        return [[replicas[name]] for name in order]

    def _load(self, replicas: Mapping[str, RunningReplica]) -> dict[str, int]:
        """The number of requests that each replica has, or for which it was chosen.

        Ray forgets a replica's queue length after some seconds, so the router counts the requests
        that it has sent. Ray's number is used where it is larger, since other routers send, too.
        """
        queue_lengths, oldest = self.replica_queue_len_cache, time.monotonic() - _UNSENT_S
        self._unsent = {k: item for k, item in self._unsent.items() if item[0] > oldest}
        num_chosen = Counter(name for _, name in self._unsent.values())
        num_open = Counter(self._open.values())
        return {
            name: max(queue_lengths.get(replica.replica_id) or 0, num_open[name]) + num_chosen[name]
            for name, replica in replicas.items()
        }

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note the replica that took a request: the first choice or, if that was full, another."""
        prompt, name = _prompt(pending_request), replica_id.unique_id
        request = pending_request.metadata.internal_request_id
        if self._unsent.pop(request, None) is not None:  # otherwise the request has ended
            self._open[request] = name
        if prompt and self._index.longest(prompt, {name})[0] != name:
            self._index.add(prompt, name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._unsent.pop(internal_request_id, None)
        self._open.pop(internal_request_id, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._index.keep({replica.replica_id.unique_id for replica in replicas})


def _prompt(request: PendingRequest | None) -> str:
    """The prompt by which a request is routed; empty if it has none."""
    prompts = (getattr(argument, "prompt", None) for argument in (request.args if request else ()))
    return next((text for text in prompts if isinstance(text, str)), "")
