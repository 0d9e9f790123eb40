"""The engine: `step()` serves every request once, from schedule to new drafts.

Charter: the order of things and the life of requests (admission, committing tokens, stopping,
ending, failing). Batching policy is the scheduler's, tensors are the runner's, text is the
detokenizer's.

Faults: an exception in the work for one request ends that request (`_alone`); one in the work for
the batch, its forward pass or its drafting, ends every running request, because their caches and
drafts are then unknown. Neither leaves `step`, and slots and blocks come back. An exception in the
schedule is a bug of ours that no request can be blamed for: it is raised, and so is what
`check_integrity` finds when the last request has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from foretoken.config import EngineConfig
from foretoken.drafting.base import DraftContext, Drafter, DraftRequest
from foretoken.engine.admission import Limits, bad_word_ids, check_request, choose_rule
from foretoken.engine.detokenizer import Detokenizer
from foretoken.engine.faults import no_token, overloaded, processing_error, step_failure
from foretoken.engine.request import Request, RequestGroup, Status
from foretoken.engine.runner import Outcome, Runner, ShareFault
from foretoken.engine.scheduler import Scheduler, Share
from foretoken.engine.threads import StepThreads
from foretoken.errors import IntegrityError
from foretoken.ops import Rule
from foretoken.outputs import SpeculationMetrics
from foretoken.sampling.noise_key import mix, unseeded
from foretoken.sampling.params import SamplingParams

_RULES = {rule.name.lower(): rule for rule in Rule}


class Engine:
    """Continuous batching of plain and speculative requests over one target."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        scheduler: Scheduler,
        drafter: Drafter | None,
        tokenizer: Any | None,
        eos_ids: frozenset[int],
        default_params: SamplingParams,
        threads: StepThreads,
    ) -> None:
        self.config = config
        self.runner = runner
        self.scheduler = scheduler
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.default_params = default_params
        self.threads = threads
        self.metrics = SpeculationMetrics()
        self._slots = runner.sampler.slots
        self._detokenizers: dict[Request, Detokenizer] = {}
        self._num_admitted = 0
        speculation = config.speculative_config
        self._rule = speculation.rejection_sample_method if speculation else "standard"

    @property
    def limits(self) -> Limits:
        """What a request must stay within."""
        return Limits(
            vocab_size=self.runner.model.vocab_size,
            max_model_len=self.runner.model.max_model_len,
            cache_tokens=self.scheduler.pool.num_blocks * self.scheduler.pool.block_size,
            num_speculative_tokens=self.num_speculative_tokens,
            has_tokenizer=self.tokenizer is not None,
            allows_synthetic=self._rule == "synthetic",
        )

    @property
    def num_speculative_tokens(self) -> int:
        """The engine's K; 0 without speculation."""
        speculation = self.config.speculative_config
        return speculation.num_speculative_tokens if speculation and self.drafter else 0

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_work

    @property
    def has_room(self) -> bool:
        """Whether the queue takes another request; `add` refuses it if not."""
        bound = self.config.max_num_waiting
        return bound is None or len(self.scheduler.waiting) < bound

    def step(self) -> list[RequestGroup]:
        """Advance every running request; returns their groups, in order of arrival.

        Raises:
            IntegrityError: nothing is left to do, and yet something is held: a bug of ours.
        """
        plan = self.scheduler.schedule()
        changed = list(dict.fromkeys(request.group for request in self.scheduler.running))
        with self.threads.during(plan.shares), self._together():
            self._release_slots()
            for request in plan.admitted:
                with self._alone(request):
                    self._admit(request)
            self._clear_fresh_blocks()
            for share, outcome in self._run(plan.shares):
                try:
                    self._commit(share, outcome)
                except Exception as error:
                    self._fail(share.request, error)
            self._draft()
        if not self.has_work:
            self.check_integrity()
        return changed

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
    ) -> RequestGroup:
        """Queue a prompt.

        Raises:
            RequestError: the prompt or its parameters are out of bounds.
            OverloadedError: `max_num_waiting` requests wait already; there is no bound on what one
                call adds, so that n samples are taken together or not at all.
        """
        params = check_request(prompt_ids, params, self.limits)
        if not self.has_room:
            raise overloaded(len(self.scheduler.waiting), self.config.max_num_waiting)
        group = RequestGroup(request_id, prompt, list(prompt_ids), params)
        admission = self._num_admitted + 1
        seed = params.seed if params.seed is not None else unseeded(self.config.seed, admission)
        stop_ids = frozenset(params.stop_ids)
        if not params.ignore_eos:
            stop_ids |= self.eos_ids
        bad_words = bad_word_ids(params, self.tokenizer, self.runner.model.vocab_size)
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None]
        rule = choose_rule(params, self._rule, self._most_drafts(params))
        for j in range(params.n):
            request = Request(group, j, mix(seed, j), list(prompt_ids), stop_ids, bad_words, rule)
            self.scheduler.add(request)
            group.samples.append(request)
        self._num_admitted = admission
        return group

    def text(self, request: Request) -> str:
        """The request's text so far; while it runs, without what a stop string may take back."""
        with self._alone(request):
            detokenizer = self._detokenizers.get(request)
            return request.text if detokenizer is None else detokenizer.settled_text
        return request.text

    def abort(self, group: RequestGroup, reason: str = "abort") -> None:
        """End a request where it is, with this finish reason; its outputs keep what they have."""
        for request in group.samples:
            if request.status is not Status.FINISHED:
                self._finish(request, reason)

    def abort_all(self) -> None:
        """End every request where it is."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._finish(request, "abort")

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if any block, slot or per-request state is leaked."""
        self.scheduler.check_integrity()
        running, waiting = self.scheduler.running, self.scheduler.waiting
        slots = {request.slot for request in running}
        kept = {
            "detokenizers": self._detokenizers.keys() - {*running, *waiting},
            "histories": self._slots.histories.keys() - slots,
            "draft probabilities": self.runner.drafts.slots - slots,
        }
        for what, leaked in kept.items():
            if leaked:
                raise IntegrityError(f"{what} of requests that ended: {leaked}")

    @contextmanager
    def _alone(self, request: Request) -> Iterator[None]:
        """Whatever is raised inside ends this request, with its reason, and nothing else."""
        try:
            yield
        except Exception as error:
            self._fail(request, error)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Whatever is raised inside ends every running request, with its reason."""
        try:
            yield
        except BaseException as error:
            failure = step_failure(error)
            for request in list(self.scheduler.running):
                request.group.error = request.group.error or failure
                self._finish(request, "error")
            if not isinstance(error, Exception):  # a second Ctrl-C: not ours to keep
                raise

    def _fail(self, request: Request, cause: Exception) -> None:
        self._blame(request, cause)
        if request.status is not Status.FINISHED:
            self._finish(request, "error")

    @staticmethod
    def _blame(request: Request, cause: Exception) -> None:
        request.group.error = request.group.error or processing_error(request, cause)

    def _run(self, shares: Sequence[Share]) -> Iterator[tuple[Share, Outcome]]:
        """The shares' outcomes; computed again without a request whose own part of it raised."""
        while live := [s for s in shares if s.request.status is Status.RUNNING]:
            try:
                outcomes = self.runner.run(live)
            except ShareFault as fault:
                self._fail(fault.request, fault.cause)
            else:
                return zip(live, outcomes, strict=True)
        return iter(())

    def _admit(self, request: Request) -> None:
        """Set up the slot of a request that the scheduler just gave one, perhaps once more."""
        self._slots.admit(
            request.slot,
            request.key,
            request.params,
            request.group.prompt_ids,
            rule=_RULES[request.rule],
            stop_ids=tuple(request.stop_ids),
            bad_word_ids=request.bad_word_ids,
        )
        self._slots.append(request.slot, request.output_ids)
        if request.index == 0 and not request.num_preemptions:
            request.group.metrics.num_cached_tokens = request.num_computed
        if self.tokenizer is not None and request not in self._detokenizers:
            self._detokenizers[request] = Detokenizer(
                self.tokenizer,
                request.group.prompt_ids,
                request.params.stop_strings,
                skip_special_tokens=request.params.skip_special_tokens,
            )

    def _commit(self, share: Share, outcome: Outcome) -> None:
        """Take over what a step computed for one request."""
        request, group = share.request, share.request.group
        if group.prompt_logprobs is not None and outcome.prompt_logprobs is not None:
            # After a preemption, some of these were there already.
            num_known = len(group.prompt_logprobs) - (request.num_computed + 1)
            group.prompt_logprobs += outcome.prompt_logprobs[num_known:]
        request.draft_ids = []
        request.num_computed += share.num_tokens + outcome.num_accepted
        if not share.decides:
            return
        if outcome.failure is not None:
            group.error = no_token(request, outcome.failure)
            self._finish(request, "error")
            return
        if group.metrics.time_to_first_token is None:
            group.metrics.time_to_first_token = time.perf_counter() - group.arrival
        num_drafts, num_accepted = len(share.drafts), outcome.num_accepted
        synthetic = request.rule == "synthetic"
        group.metrics.observe(num_drafts, num_accepted, synthetic=synthetic)
        self.metrics.observe(num_drafts, num_accepted, synthetic=synthetic)
        if self.drafter is not None and num_drafts:
            self.drafter.observe(request.slot, num_drafts, num_accepted)
        self._take_tokens(request, outcome, num_drafts)

    def _take_tokens(self, request: Request, outcome: Outcome, num_drafts: int) -> None:
        """Append tokens until one ends the request; what follows it is dropped."""
        num_accepted = outcome.num_accepted
        last = "plain" if not num_drafts else "bonus" if num_accepted == num_drafts else "resampled"
        taken = 0
        for i, token in enumerate(outcome.token_ids):
            request.token_ids.append(token)
            request.origins.append("accepted" if i < num_accepted else last)
            if outcome.logprobs is not None:
                request.logprobs.append(outcome.logprobs[i])
            taken += 1
            if self._stops(request, token):
                break
        self._slots.append(request.slot, outcome.token_ids[:taken])
        if request.finish_reason is not None:
            self._finish(request, request.finish_reason)

    def _stops(self, request: Request, token: int) -> bool:
        """Show the token and decide whether it ends the request: stops before length."""
        params = request.params
        detokenizer = self._detokenizers.get(request)
        length_before = 0
        may_stop = request.num_output >= params.min_tokens
        ends = may_stop and token in request.stop_ids
        if detokenizer is not None and (not ends or params.include_stop_str_in_output):
            length_before = len(detokenizer.text) if params.stop else 0
            detokenizer.append(token)
        if ends:
            request.finish_reason = "stop"
            request.stop_reason = token if token in params.stop_ids else None
        elif may_stop and detokenizer is not None and params.stop:
            stop = detokenizer.find_stop(length_before, params.include_stop_str_in_output)
            if stop is not None:
                request.finish_reason, request.stop_reason = "stop", stop
        if request.finish_reason is None and not request.num_remaining:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def _draft(self) -> None:
        """Ask the drafter for the next step's drafts of every request that decodes."""
        if self.drafter is None:
            return
        # Oldest first: only requests still to come can be preempted for the one that grows.
        wanted = [
            (request, k)
            for request in [*self.scheduler.running]
            if request.decodes
            and (k := self._num_drafts(request)) > 0
            and self.scheduler.grow(request, len(request.token_ids) + k)
        ]
        self._release_slots()
        if not wanted:
            return
        self._clear_fresh_blocks()
        asked = [
            DraftRequest(r.slot, r.token_ids, r.block_ids, k, r.params.temperature, _RULES[r.rule])
            for r, k in wanted
        ]
        block = self.drafter.propose(DraftContext(asked, self._slots.params))
        drafts = self.runner.drafts.put([r.slot for r in asked], block)
        for (request, _), tokens in zip(wanted, drafts, strict=True):
            request.draft_ids = tokens

    def _clear_fresh_blocks(self) -> None:
        """Tell who keeps something by block that these changed hands.

        If a model multiplies masked keys, theirs are zeroed: a NaN would poison the new owner.
        """
        fresh = self.scheduler.take_fresh_blocks()
        if fresh:
            self.runner.clear(fresh)
            if self.drafter is not None:
                self.drafter.clear(fresh)

    def _release_slots(self) -> None:
        """Forget what is kept by slot of requests that ended or were preempted."""
        left = self.scheduler.take_left_slots()
        for slot in left:
            self._slots.release(slot)
            self.runner.drafts.drop(slot)
        if self.drafter is not None:
            for slot in left:
                self.drafter.release(slot)

    def _num_drafts(self, request: Request) -> int:
        """K_b of a request: its own or the engine's, and no more than it can still emit."""
        return min(self._most_drafts(request.params), request.num_remaining - 1)

    def _most_drafts(self, params: SamplingParams) -> int:
        own = params.num_speculative_tokens
        return self.num_speculative_tokens if own is None else own

    def _finish(self, request: Request, reason: str) -> None:
        """Give back what a request holds, whatever raises on the way; its text is final."""
        request.finish_reason = reason
        group = request.group
        keep_blocks = reason != "error"  # what a fault left in them is not to be trusted
        self.scheduler.finish(request, keep_blocks=keep_blocks)
        detokenizer = self._detokenizers.pop(request, None)
        try:
            self._release_slots()
            if detokenizer is not None and not isinstance(request.stop_reason, str):
                self._flush(request, detokenizer)
        except Exception as error:
            self._blame(request, error)
            request.finish_reason = "error"
        if detokenizer is not None:
            request.text = detokenizer.text
        seconds = max(time.perf_counter() - group.arrival, 1e-9)
        group.metrics.tokens_per_second = sum(r.num_output for r in group.samples) / seconds

    @staticmethod
    def _flush(request: Request, detokenizer: Detokenizer) -> None:
        """Show what waited for more bytes; a stop string may stand in it.

        Nothing stops what was ended from outside: an aborted request stays aborted.
        """
        params, length_before = request.params, len(detokenizer.text)
        detokenizer.flush()
        may_stop = request.finish_reason in ("length", "stop")
        if params.stop and may_stop and request.num_output >= params.min_tokens:
            stop = detokenizer.find_stop(length_before, params.include_stop_str_in_output)
            if stop is not None:
                request.finish_reason, request.stop_reason = "stop", stop
