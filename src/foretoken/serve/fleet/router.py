"""The choice of a replica by prefixes (`prefixes.py`), as a request router of Ray Serve.

A router belongs to one handle, and runs in this handle's event loop.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from foretoken.serve.fleet.prefixes import PrefixIndex, rank_replicas

_UNSENT_S = 2.0  # then a request that was not sent to its replica does not count any more


class PrefixRouter(RequestRouter):
    """Prefers the replica that has computed the longest beginning of a request's prompt.

    The prompt is the attribute `prompt` of an argument, as in Ray's `PrefixCacheAffinityRouter`.
    Ray's router calls an actor three times per request; this router has its own index
    (docs/decisions/023). A request without a prompt goes to the least busy replica.
    """

    def initialize_state(self, **options: Any) -> None:
        """Take `request_router_kwargs`: arguments of `rank_replicas`."""
        self._options = options
        self._index = PrefixIndex[str]()
        self._unsent = dict[str, tuple[float, str]]()  # by request: time and replica of the choice
        self._replica_of = dict[str, str]()  # by request that was sent

    async def choose_replicas(
        self,
        candidate_replicas: Sequence[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All replicas in the order in which to try them, each in a list, as Ray demands."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not replicas:
            return []
        prompt = _prompt(pending_request)
        order = rank_replicas(prompt, self._index, self._load(replicas), **self._options)
        # Added now, since Ray chooses for all waiting requests before it sends the first of them.
        if prompt:
            self._index.add(prompt, order[0])
        if pending_request is not None:
            request = pending_request.metadata.internal_request_id
            self._unsent[request] = time.monotonic(), order[0]
        return [[replicas[name]] for name in order]

    def _load(self, replicas: Mapping[str, RunningReplica]) -> dict[str, int]:
        """For each replica, the number of open requests that were sent to it or will be.

        Ray forgets a replica's queue length after some seconds, so the router counts for itself.
        Ray's length is used where it is larger, since other routers send requests, too.
        """
        queue_lengths, oldest = self.replica_queue_len_cache, time.monotonic() - _UNSENT_S
        self._unsent = {k: item for k, item in self._unsent.items() if item[0] > oldest}
        num_chosen = Counter(name for _, name in self._unsent.values())
        num_sent = Counter(self._replica_of.values())
        return {
            name: max(queue_lengths.get(replica.replica_id) or 0, num_sent[name]) + num_chosen[name]
            for name, replica in replicas.items()
        }

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note the replica that took a request: not the chosen replica, if that was full."""
        prompt, name = _prompt(pending_request), replica_id.unique_id
        request = pending_request.metadata.internal_request_id
        if self._unsent.pop(request, None) is not None:  # otherwise the request has ended
            self._replica_of[request] = name
        if prompt and self._index.longest_match(prompt, {name})[0] != name:
            self._index.add(prompt, name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._unsent.pop(internal_request_id, None)
        self._replica_of.pop(internal_request_id, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._index.keep_only({replica.replica_id.unique_id for replica in replicas})


def _prompt(request: PendingRequest | None) -> str:
    prompts = (getattr(argument, "prompt", None) for argument in (request.args if request else ()))
    return next((text for text in prompts if isinstance(text, str)), "")
