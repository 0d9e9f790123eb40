"""The engine: `step()` serves every request once, from schedule to committed tokens.

Charter: the order of things and the life of requests (admission, committing tokens, stopping,
ending, failing). Batching policy is the scheduler's, what runs on the device is the runner's, text
is the detokenizer's.

A step is launched and committed. `step()` does one after the other; who launches the next step
before committing the last gets the same tokens, with the device never waiting for the host.

Faults: an exception in the work for one request ends that request (`_fail`); one in the work for
the batch, its drafting or its forward pass, ends every running request, because their caches are
then unknown. If it says that the device failed, the engine is broken, and everything that waits
ends, too. None of them leaves `step`, and slots and blocks come back. What can fail for one request
alone is done before the pass or at its commit, so that no pass runs twice. An exception in the
schedule is a bug of ours that no request can be blamed for: it is raised, and so is what
`check_integrity` finds when the last request has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

from foretoken.config import EngineConfig
from foretoken.engine.admission import BadWords, Limits, bad_word_ids, drafts_of
from foretoken.engine.detokenizer import Detokenizer
from foretoken.engine.devices import use_device
from foretoken.engine.faults import (
    broken_engine,
    no_token,
    overloaded,
    processing_error,
    step_failure,
)
from foretoken.engine.request import Request, RequestGroup, Share, Status
from foretoken.engine.rounds import Decode, describe, ended_at, no_text, trace_round
from foretoken.engine.runner import Runner
from foretoken.engine.scheduler import Schedule, Scheduler
from foretoken.engine.threads import StepThreads
from foretoken.engine.trace import OnStep, StepTrace
from foretoken.errors import EngineBrokenError
from foretoken.ops import Rule
from foretoken.outputs import EngineMetrics
from foretoken.sampling.edits import PackedEdits, pack_edits
from foretoken.sampling.grammar import Grammars
from foretoken.sampling.history import EditHistory
from foretoken.sampling.noise_key import mix, unseeded
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.synthetic import rates_of
from foretoken.slots.plan import NONE, Admission, StepInput, StepPlan
from foretoken.slots.step import OpenStep, Outcome, StepResult


@dataclass(slots=True)
class Launched:
    """A step on its way: its requests, and its result.

    Attributes:
        faults: by slot, what making edits for one request has raised.
    """

    groups: list[RequestGroup] = field(default_factory=list)
    trace: StepTrace | None = None
    shares: Sequence[Share] = ()
    result: StepResult = field(default_factory=StepResult)
    faults: dict[int, Exception] = field(default_factory=dict)


class Engine:
    """Continuous batching of plain and speculative requests over one target.

    Between steps `runner`, `scheduler`, `tokenizer` and `grammars` may be replaced by objects with
    the same methods.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Any | None,
        eos_ids: frozenset[int],
        default_params: SamplingParams,
        threads: StepThreads,
    ) -> None:
        self.config = config
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.grammars = Grammars(tokenizer, runner.model.vocab_size, eos_ids)
        self.default_params = default_params
        self.threads = threads
        self._control = scheduler.control
        self.metrics = self._control.metrics if self._control else EngineMetrics()
        self.on_step: OnStep | None = None
        ahead = config.async_scheduling
        self.runs_ahead = not runner.on_host if ahead is None else ahead
        self._unread = Launched()
        self._broken_by: BaseException | None = None
        self._released: list[int] = []  # slots, since the last plan
        self._num_added = 0
        self._bad_words: dict[tuple[str, ...], BadWords] = {(): ()}
        speculation = config.speculative_config
        self._rule = speculation.rejection_sample_method if speculation else "standard"
        self._synthetic_rates = rates_of(speculation) if speculation else ()
        self._decode: Decode = no_text
        if tokenizer is not None:
            self._decode = cache(lambda token: str(tokenizer.decode([token])))
        self.limits = Limits(
            vocab_size=runner.model.vocab_size,
            max_model_len=runner.model.max_model_len,
            cache_tokens=scheduler.pool.num_blocks * scheduler.pool.block_size,
            num_speculative_tokens=config.num_drafts,
            adapts=self._control is not None,
            has_tokenizer=tokenizer is not None,
            allows_synthetic=self._rule == "synthetic",
            drafter=str(speculation.method) if speculation else "",
            drafters=runner.drafter.names if runner.drafter else (),
            reads_prediction=runner.drafter.prediction_readers if runner.drafter else (),
        )

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs.

        A launched step whose requests have all ended since is no work: its result is not wanted.
        """
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
        times = [time.perf_counter()]
        plan = self.scheduler.schedule()
        times.append(time.perf_counter())
        launched = done = self.launch(plan)
        times.append(time.perf_counter())
        if self.runs_ahead:
            done, self._unread = self._unread, launched
        changed = self.commit(done)
        times.append(time.perf_counter())
        if launched.trace:
            schedule, launch, commit = (end - begin for begin, end in pairwise(times))
            launched.trace.time(schedule, launch, commit, launched.result)
        if self.on_step and done.trace and self._broken_by is None:
            done.trace.read_events(done.result)
            self.on_step(done.trace)
        if not self.has_work:
            self.check_integrity()
        return changed

    def launch(self, plan: Schedule) -> Launched:
        """Run a step: its tokens are in the slots then, and the requests know nothing of it yet."""
        groups = list(dict.fromkeys(request.group for request in self.scheduler.running))
        launched = Launched(groups, StepTrace() if self.on_step else None)
        with self._together():  # if it raises, all end
            use_device(self.runner.device)
            message, shares = self._message(plan)
            with self.threads.during(shares):
                step = self.runner.begin(message)
                del self._released[: len(message.released)]
                if step is not None:
                    edits, launched.faults = self._edits(shares, step)
                    launched.result = self.runner.finish(step, edits)
                    launched.shares = shares
        return launched

    def _message(self, plan: Schedule) -> tuple[StepPlan, list[Share]]:
        """The step as numbers, and the shares of the requests that are in it."""
        for slot in plan.left_slots:
            self._forget(slot)
        released = self._released[:]
        admissions = []
        for request in plan.admitted:
            if request.status is Status.RUNNING:  # not aborted since it was scheduled
                try:
                    admissions.append(self._admit(request))
                except Exception as error:
                    self._fail(request, error)
        shares = [s for s in plan.shares if s.request.status is Status.RUNNING]
        for share in shares:
            share.request.launched_share = share
        step = StepInput(*zip(*map(_numbers, shares), strict=True)) if shares else StepInput()
        message = StepPlan(
            released, admissions, plan.new_blocks, plan.fresh_blocks, step,
            timed=self.on_step is not None,
        )  # fmt: skip
        return message, shares

    def _edits(
        self, shares: Sequence[Share], step: OpenStep
    ) -> tuple[PackedEdits | None, dict[int, Exception]]:
        """What the host edits in the logits of a step; and what was raised, by slot."""
        deciding = [share for share in shares if share.decides]
        editing = {d: h for d, s in enumerate(deciding) if (h := s.request.history) is not None}
        if not editing:
            return None, {}
        drafts: dict[int, list[int]] = {d: [] for d in editing}
        if any(deciding[d].max_drafts for d in editing):
            drafted = step.drafted()
            drafts = {d: drafted[d] for d in editing}
        edits, faults = pack_edits(editing, drafts, self.limits.vocab_size)
        return edits, {deciding[d].slot: fault for d, fault in faults.items()}

    def commit(self, launched: Launched) -> list[RequestGroup]:
        """Let the requests have what a step computed; returns the groups of those that ran."""
        for share in launched.shares:
            if share.request.launched_share is share:  # and not one that was launched since
                share.request.launched_share = None
        with self._together():
            outcomes = launched.result.read()
            for slot, fault in launched.faults.items():
                outcomes[slot] = outcomes[slot]._replace(fault=fault)
            if launched.trace:
                launched.trace.count(launched.shares, outcomes)
            if self._control is not None:
                self._control.observe(launched.shares, outcomes, launched.result.seconds)
            for share in launched.shares:
                if share.request.status is not Status.FINISHED:  # since it was launched
                    try:
                        self._commit(share, outcomes[share.slot])
                    except Exception as error:
                        self._fail(share.request, error)
        return launched.groups

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        bad_words: BadWords | None = None,
    ) -> RequestGroup:
        """Queue a prompt that was checked: see `boundary.prepare`.

        Args:
            bad_words: `encode_bad_words` of the parameters' own; None: they are encoded here.

        Raises:
            EngineBrokenError: the device failed.
            OverloadedError: `max_num_waiting` requests wait already; there is no bound on what one
                call adds, so that n samples are taken together or not at all.
        """
        self.check_works()
        self.check_room()
        group = RequestGroup(request_id, prompt, list(prompt_ids), params)
        admission = self._num_added + 1
        seed = params.seed if params.seed is not None else unseeded(self.config.seed, admission)
        stop_ids = frozenset(params.stop_token_ids or ())
        if params.grammar or not params.ignore_eos:  # after the end of a grammar nothing may stand
            stop_ids |= self.eos_ids
        if bad_words is None:
            bad_words = self.encode_bad_words(params)
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None]
        rule = params.rejection_sample_method or self._rule
        most_drafts, adapts = drafts_of(params, rule, self.limits)
        waits = params.edits_logits and self.runs_ahead  # edits need the tokens before them
        if params.edits_logits and not self.runner.on_host:  # and the drafts
            most_drafts, adapts = 0, False
        if rule == "synthetic" and not most_drafts:
            rule = "standard"  # plain decoding, with the target's distribution
        for j in range(params.n):
            request = Request(
                group, j, mix(seed, j), list(prompt_ids), stop_ids, bad_words, rule,
                most_drafts, self.limits.number_of(params.drafter),
                waits_for_tokens=waits, adapts=adapts,
            )  # fmt: skip
            self.scheduler.add(request)
            group.samples.append(request)
        self._num_added = admission
        return group

    def encode_bad_words(self, params: SamplingParams) -> BadWords:
        """`bad_words` as token ids; those of the last call are kept. For any thread."""
        words, known = tuple(params.bad_words or ()), self._bad_words
        if words not in known:  # prompts of one call come one after the other
            ids = bad_word_ids(words, self.tokenizer, self.limits.vocab_size)
            self._bad_words = known = {(): (), words: ids}
        return known[words]

    def check_works(self) -> None:
        """Raise `EngineBrokenError` once the device has failed."""
        if self._broken_by is not None:
            raise broken_engine(self._broken_by)

    def check_room(self) -> None:
        """Raise `OverloadedError` while the queue takes no other request."""
        if not self.has_room:
            raise overloaded(len(self.scheduler.waiting), self.config.max_num_waiting)

    def settle(self, request: Request) -> None:
        """Let the request have what its new tokens say, as far as no stop string may take it back.

        This may end it: a tokenizer that raises is a fault of the request.
        """
        try:
            if (detokenizer := request.detokenizer) and (piece := detokenizer.take()):
                request.pieces.append(piece)
        except Exception as error:
            self._fail(request, error)

    def reset_prefix_cache(self) -> None:
        """Have no later request find what earlier ones computed; running ones keep their blocks."""
        self.scheduler.pool.reset()

    def abort(self, group: RequestGroup, reason: str = "abort") -> None:
        """End a request where it is, with this finish reason; its outputs keep what they have."""
        for request in group.samples:
            if request.status is not Status.FINISHED:
                self._finish(request, reason)
        self._release_idle()

    def abort_all(self) -> None:
        """End every request where it is."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._finish(request, "abort")
        self._release_idle()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if any block, slot or what is kept by slot is leaked."""
        self.scheduler.check_integrity()
        live = {request.slot for request in self.scheduler.running}
        self._release_idle()
        self.runner.slots.check_integrity(live | {*self._released})

    def _release_idle(self) -> None:
        """Tell the runner of released slots where no step will: nothing of a request is kept."""
        if self._released and not self.has_work:
            released, self._released = self._released, []
            self.runner.run(StepPlan(released))

    def _fail(self, request: Request, cause: Exception) -> None:
        """What was raised in the work for one request ends it, with its reason, and no other."""
        self._blame(request, cause)
        if request.status is not Status.FINISHED:
            self._finish(request, "error")

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Whatever is raised inside ends every running request, with its reason.

        If the device failed, those that wait end, too, and no other is taken.
        """
        try:
            yield
        except BaseException as error:
            failure, ending = step_failure(error), [*self.scheduler.running]
            if isinstance(failure, EngineBrokenError):
                self._broken_by, self._unread = error, Launched()
                ending += self.scheduler.waiting
            for request in ending:
                request.group.error = request.group.error or failure
                self._finish(request, "error")
            if not isinstance(error, Exception):  # a second Ctrl-C: not ours to keep
                raise

    @staticmethod
    def _blame(request: Request, cause: Exception) -> None:
        request.group.error = request.group.error or processing_error(request, cause)

    def _admit(self, request: Request) -> Admission:
        """Begin with a request that the scheduler just gave a slot, perhaps once more."""
        params = request.params
        if params.edits_logits and request.history is None:
            prompt_ids, stop_ids = request.group.prompt_ids, tuple(request.stop_ids)
            request.history = EditHistory(params, prompt_ids, stop_ids, request.bad_word_ids)
        if request.index == 0 and not request.num_preemptions:
            group = request.group
            group.metrics.num_cached_tokens = request.num_computed
            group.metrics.queue_time = time.perf_counter() - group.arrival
        if self.tokenizer is not None and params.detokenize and request.detokenizer is None:
            request.detokenizer = Detokenizer(
                self.tokenizer,
                request.group.prompt_ids,
                params.stop or (),
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )
        return Admission(
            request.slot, request.key, params, Rule[request.rule.upper()], request.token_ids[:],
            request.num_prompt, request.limit, request.num_computed, request.drafter,
        )  # fmt: skip

    def _commit(self, share: Share, outcome: Outcome) -> None:
        """Take over what a step computed for one request."""
        request, group = share.request, share.request.group
        if outcome.prompt_logprobs is not None and group.prompt_logprobs is not None:
            following = group.prompt_ids[share.start + 1 :][: share.num_tokens]
            most = request.params.prompt_logprobs or 0
            rows = describe(outcome.prompt_logprobs, following, most, self._decode_of(request))
            done = len(group.prompt_logprobs) - 1  # past `start` after a preemption
            group.prompt_logprobs += rows[done - share.start :]
        if share.num_preemptions == request.num_preemptions:  # else K/V and slot are another's
            request.num_computed += share.num_tokens + outcome.num_accepted
        if not share.decides:
            return
        if outcome.fault is not None:
            raise outcome.fault
        if request.history is not None:
            request.history.append(outcome.token_ids)
        number = request.drafter if outcome.drafter is None else outcome.drafter
        name = self.limits.names[number]
        if outcome.is_finite:
            if group.metrics.time_to_first_token is None:
                group.metrics.time_to_first_token = time.perf_counter() - group.arrival
            synthetic = request.rule == "synthetic"
            for metrics in (group.metrics, self.metrics):
                metrics.observe(outcome.num_drafts, outcome.num_accepted, name, synthetic=synthetic)
        self._take_tokens(request, outcome, name)  # accepted drafts stand, whatever follows them
        if not outcome.is_finite and request.status is not Status.FINISHED:
            group.error = group.error or no_token(request, outcome.bans_all)
            self._finish(request, "error")

    def _take_tokens(self, request: Request, outcome: Outcome, drafter: str) -> None:
        """Append tokens until one ends the request; what follows it is dropped."""
        tokens, decode, logprobs = outcome.token_ids, self._decode_of(request), []
        if outcome.logprobs is not None and request.params.logprobs is not None:
            logprobs = describe(outcome.logprobs, tokens, request.params.logprobs, decode)
        trace = trace_round(request, outcome, drafter or None, self._synthetic_rates, decode)
        for i, (token, origin) in enumerate(zip(tokens, outcome.origins, strict=False)):
            request.origins.append(origin)
            request.logprobs += logprobs[i : i + 1]
            request.trace += trace[i : i + 1]
            if (reason := request.append(token)) is not None:
                if trace:
                    request.trace[-1] = ended_at(trace, i)
                self._finish(request, reason)
                break

    def _decode_of(self, request: Request) -> Decode:
        """What makes a text of each of its tokens, if that was asked for."""
        return self._decode if request.params.detokenize else no_text

    def _forget(self, slot: int) -> None:
        """Its request has left this slot; the runner is told with the next plan."""
        self._released.append(slot)
        if self._control is not None:
            self._control.release(slot)

    def _finish(self, request: Request, reason: str) -> None:
        """Give back what a request holds, whatever raises on the way; its text is final."""
        request.finish_reason = reason
        group, slot = request.group, request.slot
        keep_blocks = reason != "error"  # what a fault left in them is not to be trusted
        self.scheduler.finish(request, keep_blocks=keep_blocks)
        detokenizer, request.detokenizer = request.detokenizer, None
        try:
            if slot >= 0:
                self._forget(slot)
            if detokenizer is not None and not isinstance(request.stop_reason, str):
                detokenizer.flush()  # what waited for more bytes; a stop string may stand in it
                # What was ended from outside stays so: an aborted request is aborted.
                may_stop = reason in ("length", "stop")
                may_stop = may_stop and request.num_output >= request.params.min_tokens
                if may_stop and (stop := detokenizer.find_stop()) is not None:
                    request.finish_reason, request.stop_reason = "stop", stop
        except Exception as error:
            self._blame(request, error)
            request.finish_reason = "error"
        if detokenizer is not None:
            request.pieces.append(detokenizer.text)
        seconds = max(time.perf_counter() - group.arrival, 1e-9)
        group.metrics.tokens_per_second = sum(r.num_output for r in group.samples) / seconds


def _numbers(share: Share) -> tuple[int, int, int, bool, int, int, bool]:
    """A request's part of a `StepInput`."""
    request, params, top, prompt_top = share.request, share.request.params, NONE, NONE
    if share.decides and params.logprobs is not None:
        top = params.logprobs
    if share.start < request.num_prompt and request.needs_prompt_logits:
        prompt_top = params.prompt_logprobs or 0
    known, most = share.num_tokens, share.max_drafts
    return share.slot, known, most, share.decides, top, prompt_top, params.trace
