"""The loop inside an engine's process: orders in, iterations, reports out.

The loop uses the protocol `heddle_runtime.process.stepped_engine.SteppedEngine`. It has one
thread, and executes new orders between two iterations.
"""

import select
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, assert_never

from heddle_runtime.process import wire
from heddle_runtime.process.pinned_requests import PinnedRequests
from heddle_runtime.process.running_steps import split_time
from heddle_runtime.process.stepped_engine import (
    Activity,
    Finish,
    IterationOutput,
    SteppedEngine,
    TopLogprobs,
)
from heddle_runtime.process.wire import (
    Channel,
    ClosedError,
    Order,
    pack_floats,
    pack_ids,
    unpack_ids,
)
from heddle_runtime.vllm.settings import VllmSettings

TRANSFER_POLL_S = 0.005
"""Interval of steps while there is nothing to compute but a transfer is under way."""
BEATS = 8
"""Heartbeats in the time after which a silent engine has hung."""
DRAIN_STEPS = 1000
"""At most this many iterations until an idle core has freed aborted requests."""


@dataclass(slots=True, eq=False)
class _Job:
    """A request on the core, with the order that it serves."""

    id: int
    order: wire.Start | wire.Export | wire.Import
    prompt: list[int]
    request: str = ""
    attempt: int = 0
    started_s: float = 0.0
    first_s: float = 0.0
    cached_tokens: int = 0
    recomputes: int = 0
    made: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    stop_reason: int | str | None = None
    reported_tokens: int = 0
    """How many of `made` a `Progress` has reported."""
    kv: dict[str, Any] | None = None
    """The handle that an import will pull."""
    pull_until_s: float = 0.0
    """No pull may begin after that."""
    why: str = ""
    """Why the import prefills instead of a pull."""


class EngineLoop:
    """Serves one driver until it sends `Stop` or is gone."""

    def __init__(
        self, core: SteppedEngine, channel: Channel[Order], settings: VllmSettings
    ) -> None:
        self._core, self._channel, self._settings = core, channel, settings
        self._jobs: dict[int, _Job] = {}
        self._by_request: dict[str, _Job] = {}
        self._pinned = PinnedRequests(core, settings.pin_s)
        self._exported: dict[str, tuple[str, float]] = {}
        """By trajectory: a request whose KV waits for a pull, and the end of its lease."""
        self._released: list[str] = []
        """Such requests to let go after the next iteration: vLLM knows of a lease only then."""
        self._version = self._preemptions = 0
        self._progress_due_s = self._sample_due_s = self._beat_due_s = 0.0
        self._beat_s = settings.hang_s / BEATS
        self._sampled: wire.Sampled | None = None
        self._came_after_s = time.monotonic()
        """No order that is executed now came before."""
        self._stopping = False

    def run(self) -> None:
        """Serve until `Stop`.

        Raises:
            ClosedError: the driver is gone.
        """
        while not self._stopping:
            activity = self._core.activity()
            if activity != "computing":
                self._wait(activity)
                self._came_after_s = time.monotonic()
            looked_s = time.monotonic()
            for order in self._channel.receive():
                self._execute(order)
            self._came_after_s = looked_s
            released, self._released = self._released, []
            if self._core.activity() != "idle":
                self._process_outputs(self._core.step())
            for request in released:
                self._core.release(request)
            self._report()

    def _wait(self, activity: Activity) -> None:
        """Wait for an order, or for a transfer, a report or a heartbeat that is due."""
        writes = [self._channel] if self._channel.clogged else []
        timeout_s = min(self._beat_s, TRANSFER_POLL_S) if activity == "waiting" else self._beat_s
        if activity == "idle" and (self._sampled != self._sample() or self._pinned.any):
            timeout_s = min(timeout_s, self._settings.sample_s)
        select.select([self._channel], writes, [], timeout_s)
        if writes:
            self._channel.flush()

    # -- orders -----------------------------------------------------------------------------------

    def _execute(self, order: Order) -> None:
        match order:
            case wire.Start():
                self._release(order.trajectory)
                self._submit(_Job(order.id, order, unpack_ids(order.prompt)))
            case wire.Abort():
                self._abort(order.id)
            case wire.Forget():
                self._release(order.trajectory)
                self._pinned.drop(order.trajectory)
            case wire.Export():
                self._release(order.trajectory)
                self._pinned.drop(order.trajectory)
                self._submit(_Job(order.id, order, unpack_ids(order.prompt)))
            case wire.Import():
                until_s = self._came_after_s + order.remaining_s
                prompt = unpack_ids(order.prompt)
                self._submit(_Job(order.id, order, prompt, kv=order.kv, pull_until_s=until_s))
            case wire.LoadWeights():
                self._load_weights(order)
            case wire.Sleep():
                began_s = time.monotonic()
                self._core.sleep(order.level)
                self._channel.send(wire.Slept(time.monotonic() - began_s))
            case wire.Wake():
                began_s = time.monotonic()
                self._core.wake()
                self._channel.send(wire.Woke(time.monotonic() - began_s))
            case wire.Stop():
                self._stopping = True
            case wire.Boot():
                raise AssertionError("an engine boots once")
            case _:
                assert_never(order)

    def _submit(self, job: _Job) -> None:
        """Add a job to the core; answer at once if the core refuses it."""
        order = job.order
        if isinstance(order, wire.Import):
            self._check_handle(job)
        job.request = f"{job.id}.{job.attempt}"
        salt = f"weights {self._version} {order.salt}" if self._version else order.salt
        try:
            if isinstance(order, wire.Start):
                context = job.prompt + job.made
                # What continues a pinned request keeps the sampling that began it.
                pins = self._pinned.on and order.sampling is None
                if not pins:
                    self._pinned.drop(order.trajectory)
                pinned, known = self._pinned.take(order.trajectory, context)
                job.request = pinned or job.request
                job.cached_tokens = known
                self._core.add(
                    job.request,
                    context,
                    max_tokens=order.max_tokens - len(job.made),
                    exact=order.exact,
                    seed=f"{self._settings.seed}/{order.trajectory}/{len(job.prompt)}",
                    salt=salt,
                    pin=pins,
                    known=known,
                    sampling=order.sampling,
                )
            else:
                self._core.add(
                    job.request,
                    job.prompt,
                    max_tokens=1,
                    salt=salt,
                    kv=job.kv["params"] if job.kv is not None else None,
                    export=isinstance(order, wire.Export),
                )
        except ValueError as error:
            self._core.abort(job.request)  # drops a pinned request
            self._jobs.pop(job.id, None)
            self._answer(job, "error", str(error))
            return
        self._jobs[job.id] = self._by_request[job.request] = job

    def _check_handle(self, job: _Job) -> None:
        if job.kv is None:
            return
        if time.monotonic() > job.pull_until_s:
            job.kv, job.why = None, "its lease had ended"
        elif job.kv["version"] != self._version:
            job.kv, job.why = None, "it is of other weights"

    def _abort(self, id_: int) -> None:
        job = self._jobs.get(id_)
        if job is not None:
            self._core.abort(job.request)
            self._end(job, "abort")

    def _release(self, trajectory: str) -> None:
        exported = self._exported.pop(trajectory, None)
        if exported is not None and time.monotonic() < exported[1]:
            self._released.append(exported[0])

    def _load_weights(self, order: wire.LoadWeights) -> None:
        """Remove every request from the core, load the weights, and add the requests again.

        The salt has the version, so no prompt finds KV of other weights. A cleared cache is not
        needed; vLLM cannot clear it while other engines may pull blocks. With KV kept, nothing of
        this is done: the next iteration computes with the new weights.
        """
        if order.keep_kv:
            self._core.load_weights(order.path, keep_kv=True)
            self._channel.send(wire.WeightsLoaded(order.version))
            return
        self._pinned.clear()
        jobs = list(self._jobs.values())
        for job in jobs:
            self._core.abort(job.request)
        for _ in range(DRAIN_STEPS):
            if self._core.activity() != "computing":
                break
            self._core.step()
        self._core.load_weights(order.path)
        self._version = order.version
        self._exported.clear()
        self._by_request.clear()
        for job in jobs:
            job.attempt += 1
            job.recomputes += job.started_s > 0
            if isinstance(job.order, wire.Export):
                self._end(job, "abort")
            else:
                self._submit(job)
        self._channel.send(wire.WeightsLoaded(order.version))

    # -- iterations -------------------------------------------------------------------------------

    def _process_outputs(self, outputs: Iterable[IterationOutput]) -> None:
        now_s = 0.0
        for output in outputs:
            job = self._by_request.get(output.request)
            if job is None:
                continue  # aborted while the iteration ran
            if not now_s:
                now_s = time.monotonic()
            if output.scheduled_s and not job.started_s:
                job.started_s = output.scheduled_s
            if output.preemptions:
                job.recomputes += output.preemptions
                self._preemptions += output.preemptions
            if output.cached_tokens >= 0 and not job.first_s:
                job.cached_tokens = output.cached_tokens
            if output.tokens:
                if not job.first_s:
                    job.first_s = now_s
                job.made += output.tokens
                job.logprobs += output.logprobs
                job.top += output.top
            if output.finish:
                job.stop_reason = output.stop_reason
                self._finished(job, output)

    def _finished(self, job: _Job, output: IterationOutput) -> None:
        if isinstance(job.order, wire.Export) and output.kv is not None:
            until_s = time.monotonic() + self._settings.kv_lease_s
            self._exported[job.order.trajectory] = job.request, until_s
            self._forget_job(job)
            kv = {"params": output.kv, "version": self._version}
            self._channel.send(wire.Exported(job.id, kv, self._whole_blocks(job)))
        elif isinstance(job.order, wire.Import) and output.finish != "length" and job.kv:
            self._prefill_instead(job, "the pull failed")
        else:
            order = job.order
            pinned = isinstance(order, wire.Start) and self._pinned.on and order.sampling is None
            if isinstance(order, wire.Start) and pinned and output.finish != "error":
                context = job.prompt + job.made
                self._pinned.keep(order.trajectory, job.request, context, time.monotonic())
            self._end(job, output.finish)

    def _prefill_instead(self, job: _Job, why: str) -> None:
        self._forget_job(job)
        job.kv, job.why = None, why
        job.attempt += 1
        self._submit(job)

    def _watch_pulls(self, now_s: float) -> None:
        """Replace pulls that began too late or take too long by a prefill."""
        for job in list(self._jobs.values()):
            if not isinstance(job.order, wire.Import) or job.kv is None:
                continue
            late_s = now_s - job.pull_until_s
            if late_s > self._settings.kv_margin_s or (
                late_s > 0 and not self._core.has_begun(job.request)
            ):
                self._core.abort(job.request)
                self._prefill_instead(job, "its lease ended before the pull")

    # -- reports ----------------------------------------------------------------------------------

    def _report(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._beat_due_s:
            self._beat_due_s = now_s + self._beat_s
            self._channel.send(wire.Alive())
        if now_s >= self._progress_due_s:
            self._progress_due_s = now_s + self._settings.progress_s
            made = [
                self._made(job)
                for job in self._jobs.values()
                if len(job.made) > job.reported_tokens and isinstance(job.order, wire.Start)
            ]
            if made:
                self._channel.send(wire.Progress(made))
            self._watch_pulls(now_s)
            self._pinned.tidy(now_s)
        if now_s >= self._sample_due_s:
            self._sample_due_s = now_s + self._settings.sample_s
            sampled = self._sample()
            if sampled != self._sampled:
                self._sampled = sampled
                self._channel.send(sampled)
        elif self._channel.clogged:
            self._channel.flush()

    def _sample(self) -> wire.Sampled:
        return wire.Sampled(
            *self._core.counters(), preemptions=self._preemptions, drafted=self._core.drafted
        )

    def _made(self, job: _Job) -> wire.Made:
        tokens, logprobs, top = self._unreported(job)
        return wire.Made(job.id, tokens, *_times(job), logprobs, top)

    def _unreported(self, job: _Job) -> tuple[bytes, bytes, list[TopLogprobs]]:
        """New tokens and their log-probs."""
        begin, job.reported_tokens = job.reported_tokens, len(job.made)
        return pack_ids(job.made[begin:]), pack_floats(job.logprobs[begin:]), job.top[begin:]

    def _whole_blocks(self, job: _Job) -> int:
        return len(job.prompt) // self._core.block_tokens * self._core.block_tokens

    def _forget_job(self, job: _Job) -> None:
        self._jobs.pop(job.id, None)
        self._by_request.pop(job.request, None)

    def _end(self, job: _Job, finish: Finish) -> None:
        self._forget_job(job)
        self._answer(job, finish, "vLLM reports an internal error" if finish == "error" else "")

    def _answer(self, job: _Job, finish: Finish, error: str) -> None:
        order = job.order
        match order:
            case wire.Export():
                self._channel.send(wire.Exported(job.id, None, 0))
            case wire.Import():
                there = self._whole_blocks(job) if finish == "length" else 0
                way: Literal["kv", "prefill", "none"] = "kv" if job.kv is not None else "prefill"
                self._channel.send(
                    wire.Placed(job.id, way if there else "none", there, job.why or error)
                )
            case wire.Start():
                self._channel.send(self._ended(job, finish, error))
            case _:
                assert_never(order)

    def _ended(self, job: _Job, finish: Finish, error: str) -> wire.Ended:
        prefill_s, decode_s = _times(job)
        tokens, logprobs, top = self._unreported(job)
        return wire.Ended(
            id=job.id,
            tokens=tokens,
            logprobs=logprobs,
            top=top,
            finish=finish,
            stop_reason=job.stop_reason,
            finished=finish != "abort",
            prefill_s=prefill_s,
            decode_s=decode_s,
            cached_tokens=job.cached_tokens,
            recomputes=job.recomputes,
            error=error,
        )


def _times(job: _Job) -> tuple[float, float]:
    """Seconds in prefill and in decode so far; the driver counts the others as queued."""
    _, prefill_s, decode_s = split_time(0.0, job.started_s, job.first_s, time.monotonic())
    return prefill_s, decode_s


def serve(core: SteppedEngine, channel: Channel[Order], settings: VllmSettings) -> None:
    """Run the loop until the driver sends `Stop` or is gone."""
    try:
        EngineLoop(core, channel, settings).run()
    except ClosedError:
        return
