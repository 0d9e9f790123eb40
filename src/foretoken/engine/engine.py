"""The engine: `step()` serves every request once, from schedule to committed tokens.

A step is launched, then committed. On an asynchronous device the next step is launched before the
last one is committed: the tokens are the same, and the device never waits for the host.

Faults: an exception in the work for one request ends that request (`_fail`). An exception in the
work for the batch (drafting, the forward pass) ends every running request, because the content of
their caches is then unknown. If the device failed, the engine is broken, and waiting requests end,
too. `step` raises none of these exceptions, and slots and blocks are given back. Work that can fail
for a single request is done before the pass or at its commit, so that no pass runs twice. `step`
raises only exceptions of the scheduler and `IntegrityError`, which are bugs in Foretoken.
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
from foretoken.engine import faults
from foretoken.engine.admission import BadWords, Limits, bad_word_ids, choose_num_drafts
from foretoken.engine.detokenizer import Detokenizer
from foretoken.engine.devices import use_device
from foretoken.engine.request import Request, RequestGroup, Share, Status
from foretoken.engine.rounds import TokenText, last_record, logprob_rows, no_text, trace_round
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
from foretoken.slots.step import NONE, Admission, OpenStep, Outcome, StepInput, StepPlan, StepResult


@dataclass(slots=True)
class Launched:
    """A step that was launched and not yet committed.

    edit_faults: by slot, the exceptions that were raised while edits of logits were made
    """

    groups: list[RequestGroup] = field(default_factory=list)
    trace: StepTrace | None = None
    shares: Sequence[Share] = ()
    result: StepResult = field(default_factory=StepResult)
    edit_faults: dict[int, Exception] = field(default_factory=dict)


class Engine:
    """Continuous batching of plain and speculative requests over one target.

    Between steps `runner`, `scheduler`, `tokenizer` and `grammars` may be replaced by objects with
    the same methods.

    Attributes:
        on_step: called with the trace of each committed step; None: no step is timed.
        runs_ahead: whether a step is launched before the last one is committed.
    """

    def __init__(
        self, config: EngineConfig, runner: Runner, scheduler: Scheduler, tokenizer: Any | None,
        eos_ids: frozenset[int], default_params: SamplingParams, threads: StepThreads,
    ) -> None:  # fmt: skip
        self.config, self.runner, self.scheduler = config, runner, scheduler
        self.tokenizer, self.eos_ids = tokenizer, eos_ids
        self.grammars = Grammars(tokenizer, runner.model.vocab_size, eos_ids)
        self.default_params, self.threads = default_params, threads
        self._control = scheduler.control
        self.metrics = self._control.metrics if self._control else EngineMetrics()
        self.on_step: OnStep | None = None
        ahead = config.async_scheduling
        self.runs_ahead = not runner.on_host if ahead is None else ahead
        self._uncommitted = Launched()
        self._device_error: BaseException | None = None
        self._released: list[int] = []  # slots that requests have left since the last plan
        self._num_added = 0
        self._bad_words: dict[tuple[str, ...], BadWords] = {(): ()}
        speculation = config.speculative_config
        self._rule = speculation.rejection_sample_method if speculation else "standard"
        self._synthetic_rates = rates_of(speculation) if speculation else ()
        self._text_of: TokenText = no_text
        if tokenizer is not None:
            self._text_of = cache(lambda token: str(tokenizer.decode([token])))
        self.limits = Limits(
            vocab_size=runner.model.vocab_size, max_model_len=runner.model.max_model_len,
            cache_tokens=scheduler.pool.num_blocks * scheduler.pool.block_size,
            num_speculative_tokens=config.num_drafts, adapts=self._control is not None,
            has_tokenizer=tokenizer is not None, allows_synthetic=self._rule == "synthetic",
            drafter=str(speculation.method) if speculation else "",
            drafters=runner.drafter.names if runner.drafter else (),
            reads_prediction=runner.drafter.prediction_readers if runner.drafter else (),
        )  # fmt: skip

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def has_room(self) -> bool:
        bound = self.config.max_num_waiting
        return bound is None or len(self.scheduler.waiting) < bound

    def step(self) -> list[RequestGroup]:
        """Launch a step of all running requests, and commit this step (if `runs_ahead`, the
        last step); returns the groups of the committed step, in order of arrival.

        Raises:
            IntegrityError: no work is left, but a block or slot is not free: a bug in Foretoken.
        """
        times = [time.perf_counter()]
        schedule = self.scheduler.schedule()
        times.append(time.perf_counter())
        launched = to_commit = self.launch(schedule)
        times.append(time.perf_counter())
        if self.runs_ahead:  # commit the last step, and leave this one to the next call
            to_commit, self._uncommitted = self._uncommitted, launched
        changed = self.commit(to_commit)
        times.append(time.perf_counter())
        if launched.trace:
            seconds = [end - begin for begin, end in pairwise(times)]
            launched.trace.time(seconds, launched.result)
        if self.on_step and to_commit.trace and self._device_error is None:
            to_commit.trace.read_events(to_commit.result)
            self.on_step(to_commit.trace)
        if not self.has_work:
            self.check_integrity()
        return changed

    def launch(self, schedule: Schedule) -> Launched:
        """Launch a step. Its tokens are written to the slots; `commit` gives them to requests."""
        groups = list(dict.fromkeys(request.group for request in self.scheduler.running))
        launched = Launched(groups, StepTrace() if self.on_step else None)
        with self._ending_batch_on_error():
            use_device(self.runner.device)
            plan, shares = self._plan_step(schedule)
            with self.threads.during(shares):
                step = self.runner.begin(plan)
                del self._released[: len(plan.released)]  # the runner has released these slots
                if step is not None:
                    edits, launched.edit_faults = self._edits(shares, step)
                    launched.result = self.runner.finish(step, edits)
                    launched.shares = shares
        return launched

    def _plan_step(self, schedule: Schedule) -> tuple[StepPlan, list[Share]]:
        """The plan of a step, and its shares, without requests that ended after the schedule."""
        for slot in schedule.left_slots:
            self._release_slot(slot)
        released = self._released[:]
        admissions = []
        for request in schedule.admitted:
            if request.status is Status.RUNNING:
                try:
                    admissions.append(self._admit(request))
                except Exception as error:
                    self._fail(request, error)
        shares = [s for s in schedule.shares if s.request.status is Status.RUNNING]
        for share in shares:
            share.request.launched_share = share
        step = StepInput(*zip(*map(_input_row, shares), strict=True)) if shares else StepInput()
        plan = StepPlan(
            released, admissions, schedule.new_blocks, schedule.fresh_blocks, step,
            timed=self.on_step is not None,
        )  # fmt: skip
        return plan, shares

    def _edits(
        self, shares: Sequence[Share], step: OpenStep
    ) -> tuple[PackedEdits | None, dict[int, Exception]]:
        """The host's edits of a step's logits (None: no request has any), and `edit_faults`."""
        deciding = [share for share in shares if share.decides]
        requests = enumerate(share.request for share in deciding)
        histories = {d: request.history for d, request in requests if request.history is not None}
        if not histories:
            return None, {}
        drafts: dict[int, list[int]] = {d: [] for d in histories}
        if any(deciding[d].max_drafts for d in histories):
            drafts_D = step.read_drafts()
            drafts = {d: drafts_D[d] for d in histories}
        edits, errors = pack_edits(histories, drafts, self.limits.vocab_size)
        return edits, {deciding[d].slot: error for d, error in errors.items()}

    def commit(self, launched: Launched) -> list[RequestGroup]:
        """Give requests the results of a step; returns the groups that ran at the launch."""
        for share in launched.shares:
            if share.request.launched_share is share:  # the request is in no later step
                share.request.launched_share = None
        with self._ending_batch_on_error():
            outcomes = launched.result.read()
            for slot, error in launched.edit_faults.items():
                outcomes[slot] = outcomes[slot]._replace(fault=error)
            if launched.trace:
                launched.trace.count(launched.shares, outcomes)
            if self._control is not None:
                self._control.observe(launched.shares, outcomes, launched.result.seconds)
            for share in launched.shares:
                if share.request.status is not Status.FINISHED:
                    try:
                        self._commit(share, outcomes[share.slot])
                    except Exception as error:
                        self._fail(share.request, error)
        return launched.groups

    def add(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams,
        prompt: str | None = None, bad_words: BadWords | None = None,
    ) -> RequestGroup:  # fmt: skip
        """Queue a prompt that `boundary.prepare` has checked.

        Args:
            bad_words: `encode_bad_words(params)`; None: they are encoded here.

        Raises:
            EngineBrokenError: the device failed.
            OverloadedError: `max_num_waiting` requests wait already. (The n samples of a prompt are
                queued together, and may exceed this bound.)
        """
        self.check_works()
        self.check_room()
        group = RequestGroup(request_id, prompt, list(prompt_ids), params)
        number = self._num_added + 1
        seed = params.seed if params.seed is not None else unseeded(self.config.seed, number)
        stop_ids = frozenset(params.stop_token_ids or ())
        if params.grammar or not params.ignore_eos:  # no token may follow the end of a grammar
            stop_ids |= self.eos_ids
        if bad_words is None:
            bad_words = self.encode_bad_words(params)
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None]
        rule = params.rejection_sample_method or self._rule
        num_drafts, adapts = choose_num_drafts(params, rule, self.limits)
        # Edits depend on the tokens before them, so the request waits until the host knows these.
        # An asynchronous device does not tell the host drafts in time to edit the drafts' rows.
        waits = params.edits_logits and self.runs_ahead
        if params.edits_logits and not self.runner.on_host:
            num_drafts, adapts = 0, False
        if rule == "synthetic" and not num_drafts:
            rule = "standard"  # plain decoding, with the target's distribution
        for j in range(params.n):
            request = Request(
                group, j, mix(seed, j), list(prompt_ids), stop_ids, bad_words, rule,
                num_drafts, self.limits.drafter_index(params.drafter),
                waits_for_tokens=waits, adapts=adapts,
            )  # fmt: skip
            self.scheduler.add(request)
            group.samples.append(request)
        self._num_added = number
        return group

    def encode_bad_words(self, params: SamplingParams) -> BadWords:
        """`bad_words` as token ids. Any thread may call this."""
        words, cached = tuple(params.bad_words or ()), self._bad_words
        if words not in cached:  # only the last words are kept: one call often repeats them
            ids = bad_word_ids(words, self.tokenizer, self.limits.vocab_size)
            self._bad_words = cached = {(): (), words: ids}
        return cached[words]

    def check_works(self) -> None:
        """Raise `EngineBrokenError` once the device has failed."""
        if self._device_error is not None:
            raise faults.broken_engine(self._device_error)

    def check_room(self) -> None:
        """Raise `OverloadedError` if the queue is full."""
        if not self.has_room:
            raise faults.overloaded(len(self.scheduler.waiting), self.config.max_num_waiting)

    def update_text(self, request: Request) -> None:
        """Append to `request.pieces` the new text that no later token can change. If the tokenizer
        raises, the request ends with that error."""
        try:
            if (detokenizer := request.detokenizer) and (piece := detokenizer.take()):
                request.pieces.append(piece)
        except Exception as error:
            self._fail(request, error)

    def reset_prefix_cache(self) -> None:
        """Let later requests reuse no cached block; running requests keep their blocks."""
        self.scheduler.pool.reset()

    def abort(self, group: RequestGroup, reason: str = "abort") -> None:
        """End a request now, with this finish reason; it keeps its tokens."""
        for request in group.samples:
            if request.status is not Status.FINISHED:
                self._finish(request, reason)
        self._release_idle()

    def abort_all(self) -> None:
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._finish(request, "abort")
        self._release_idle()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if a block, a slot or a slot's state is leaked."""
        self.scheduler.check_integrity()
        live = {request.slot for request in self.scheduler.running}
        self._release_idle()
        self.runner.slots.check_integrity(live | {*self._released})

    def _release_idle(self) -> None:
        """If no work remains, no step follows: release the slots of ended requests now."""
        if self._released and not self.has_work:
            released, self._released = self._released, []
            self.runner.run(StepPlan(released))

    def _fail(self, request: Request, cause: Exception) -> None:
        """End one request, because the work for it raised `cause`."""
        self._set_error(request, cause)
        if request.status is not Status.FINISHED:
            self._finish(request, "error")

    @contextmanager
    def _ending_batch_on_error(self) -> Iterator[None]:
        """An exception inside ends all running requests, and waiting ones if the device failed."""
        try:
            yield
        except BaseException as error:
            failure, ending = faults.step_failure(error), [*self.scheduler.running]
            if isinstance(failure, EngineBrokenError):
                self._device_error, self._uncommitted = error, Launched()
                ending += self.scheduler.waiting
            for request in ending:
                request.group.error = request.group.error or failure
                self._finish(request, "error")
            if not isinstance(error, Exception):  # KeyboardInterrupt by a second Ctrl-C
                raise

    @staticmethod
    def _set_error(request: Request, cause: Exception) -> None:
        request.group.error = request.group.error or faults.processing_error(request, cause)

    def _admit(self, request: Request) -> Admission:
        """The admission of a request that got a slot; also makes the request's edit history and
        detokenizer, unless it has these from before a preemption."""
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
                self.tokenizer, request.group.prompt_ids, params.stop or (),
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )  # fmt: skip
        return Admission(
            request.slot, request.key, params, Rule[request.rule.upper()], request.token_ids[:],
            request.num_prompt, request.limit, request.num_computed, request.drafter,
        )  # fmt: skip

    def _commit(self, share: Share, outcome: Outcome) -> None:
        request, group = share.request, share.request.group
        if outcome.prompt_logprobs is not None and group.prompt_logprobs is not None:
            next_tokens = group.prompt_ids[share.start + 1 :][: share.num_tokens]
            num_top = request.params.prompt_logprobs or 0
            text_of = self._text_of if request.params.detokenize else no_text
            rows = logprob_rows(outcome.prompt_logprobs, next_tokens, num_top, text_of)
            # After a preemption the group may have the first rows of a chunk already.
            num_known = len(group.prompt_logprobs) - 1
            group.prompt_logprobs += rows[num_known - share.start :]
        if share.num_preemptions == request.num_preemptions:  # else a preemption lost the K/V
            request.num_computed += share.num_tokens + outcome.num_accepted
        if not share.decides:
            return
        if outcome.fault is not None:
            raise outcome.fault
        if request.history is not None:
            request.history.append(outcome.token_ids)
        drafter_index = request.drafter if outcome.drafter is None else outcome.drafter
        name = self.limits.names[drafter_index]
        if outcome.is_finite:
            if group.metrics.time_to_first_token is None:
                group.metrics.time_to_first_token = time.perf_counter() - group.arrival
            synthetic = request.rule == "synthetic"
            for metrics in (group.metrics, self.metrics):
                metrics.observe(outcome.num_drafts, outcome.num_accepted, name, synthetic=synthetic)
        self._take_tokens(request, outcome, name)  # accepted drafts hold even if no token follows
        if not outcome.is_finite and request.status is not Status.FINISHED:
            group.error = group.error or faults.no_token(request, outcome.bans_all)
            self._finish(request, "error")

    def _take_tokens(self, request: Request, outcome: Outcome, drafter: str) -> None:
        """Append the outcome's tokens, up to the first token that ends the request."""
        tokens, logprobs = outcome.token_ids, []
        text_of = self._text_of if request.params.detokenize else no_text
        if outcome.logprobs is not None and request.params.logprobs is not None:
            logprobs = logprob_rows(outcome.logprobs, tokens, request.params.logprobs, text_of)
        trace = trace_round(request, outcome, drafter or None, self._synthetic_rates, text_of)
        for i, (token, origin) in enumerate(zip(tokens, outcome.origins, strict=False)):
            request.origins.append(origin)
            request.logprobs += logprobs[i : i + 1]
            request.trace += trace[i : i + 1]
            if (reason := request.append(token)) is not None:
                if trace:
                    request.trace[-1] = last_record(trace, i)
                self._finish(request, reason)
                break

    def _release_slot(self, slot: int) -> None:
        """Let the next plan release a slot that a request has left."""
        self._released.append(slot)
        if self._control is not None:
            self._control.release(slot)

    def _finish(self, request: Request, reason: str) -> None:
        """Give back a request's slot and blocks, and complete its text."""
        request.finish_reason = reason
        group, slot = request.group, request.slot
        # After an error the K/V may be wrong: no later request may reuse them.
        self.scheduler.finish(request, keep_blocks=reason != "error")
        detokenizer, request.detokenizer = request.detokenizer, None
        try:
            if slot >= 0:
                self._release_slot(slot)
            if detokenizer is not None and not isinstance(request.stop_reason, str):
                detokenizer.flush()  # the flushed text may complete a stop string
                can_stop = reason in ("length", "stop")  # an aborted request stays aborted
                can_stop = can_stop and request.num_output >= request.params.min_tokens
                if can_stop and (stop := detokenizer.find_stop()) is not None:
                    request.finish_reason, request.stop_reason = "stop", stop
        except Exception as error:
            self._set_error(request, error)
            request.finish_reason = "error"
        if detokenizer is not None:
            request.pieces.append(detokenizer.text)
        seconds = max(time.perf_counter() - group.arrival, 1e-9)
        group.metrics.tokens_per_second = sum(r.num_output for r in group.samples) / seconds


def _input_row(share: Share) -> tuple[int, int, int, bool, int, int, bool]:
    """A request's entries of `StepInput`, in the order of the fields."""
    request, params = share.request, share.request.params
    num_logprobs = num_prompt_logprobs = NONE
    if share.decides and params.logprobs is not None:
        num_logprobs = params.logprobs
    if share.start < request.num_prompt and request.needs_prompt_logits:
        num_prompt_logprobs = params.prompt_logprobs or 0
    return (
        share.slot, share.num_tokens, share.max_drafts, share.decides, num_logprobs,
        num_prompt_logprobs, params.trace,
    )  # fmt: skip
