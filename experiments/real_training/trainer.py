"""A trainer's process, seen from the driver: started again where it dies, and no batch is lost."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from experiments.real_training.checkpoints import checkpoint, newest, remove_but
from experiments.real_training.messages import (
    BatchTrained,
    PartDone,
    TrainBatch,
    TrainerBoot,
    TrainerReady,
    TrainerReport,
    TrainerSettings,
    TrainMetrics,
    TrainPart,
    TrainSample,
)
from heddle_core.commands import AccumulateGradients, Train
from heddle_rollout.agents import Agent
from heddle_rollout.loop_driver import OnTrained
from heddle_runtime.process.child import ChildProcess
from heddle_runtime.process.wire import Broken, Stop, pack_floats, pack_ids

MOST_DEATHS = 3
"""Of the process without a trained batch in between; then the run fails."""

STOP_LIMIT_S = 10.0


class TrainerFailedError(RuntimeError):
    """The trainer's process dies again and again; the message has its reason and its log."""


class TrainedAgent(Agent, Protocol):
    """An agent whose tokens can be trained on."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """Begin and end of each generation in `context_ids`."""
        ...

    @property
    def logprobs(self) -> Sequence[float]:
        """Of all generated tokens, in order."""
        ...

    @property
    def reward(self) -> float:
        """Of the finished trajectory."""
        ...


class ProcessTrainer:
    """Implements `Trainer`. Use it inside a running event loop."""

    def __init__(
        self,
        settings: TrainerSettings,
        folder: Path,
        *,
        on_error: Callable[[BaseException], None],
        on_batch: Callable[[int, TrainMetrics], None] = lambda batch, metrics: None,
        module: str = "experiments.real_training.process",
    ) -> None:
        """Checkpoints and the log go to `folder`. `module` runs in the process.

        `on_batch` is called before the loop continues after a batch; `on_error` when the process
        cannot go on.
        """
        self._settings, self._folder, self._module = settings, folder, module
        self._on_error, self._on_batch = on_error, on_batch
        self._loop = asyncio.get_running_loop()
        self._child: ChildProcess[TrainerReport] | None = None
        self._ready: asyncio.Future[TrainerReady] = self._loop.create_future()
        self._is_ready = False
        self._pending: tuple[TrainPart | TrainBatch, OnTrained] | None = None
        """The batch or part in training; it is sent again to a new process."""
        self._parts: list[TrainPart] = []
        """Of the batch in collection, answered ones; a new process gets them again first."""
        self._again = 0
        """Parts whose second answer is due."""
        self._deaths = 0
        self._reason = ""
        self._closing = False
        self._gone = asyncio.Event()
        self._pushed: int | None = None
        """The batch whose weights engines have or get."""
        self.restarts = 0
        """Processes that died and were replaced."""

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._child.pid if self._child is not None else None

    def weights_to_push(self) -> Path:
        """Return the folder of the newest complete weights.

        It stays until the next call: engines that start later load it too.
        """
        batch = newest(self._folder)
        self._pushed = batch
        return Path(self._settings.model_dir) if batch is None else checkpoint(self._folder, batch)

    async def start(self) -> TrainerReady:
        """Start the process and wait until it has loaded the model.

        Raises:
            TrainerFailedError: it cannot.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._launch()
        return await self._ready

    def accumulate(
        self, command: AccumulateGradients, agents: Sequence[Agent], then: OnTrained
    ) -> None:
        samples = [sample_of(agent) for agent in agents]
        self._pending = TrainPart(command.batch, len(self._parts), samples), then
        self._send_pending()

    def train(self, command: Train, agents: Sequence[Agent], then: OnTrained) -> None:
        samples = [sample_of(agent) for agent in agents]
        self._pending = TrainBatch(command.batch, samples, len(self._parts)), then
        self._send_pending()

    async def close(self) -> None:
        """End the process; afterwards nothing of it is left."""
        self._closing = True
        if self._child is None:
            return
        self._child.send(Stop())
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await self._gone.wait()
        except TimeoutError:
            self.kill()
            await self._gone.wait()

    def kill(self) -> None:
        """End the process now."""
        self._closing = True
        if self._child is not None:
            self._child.kill(silent=True)

    # -- the process ------------------------------------------------------------------------------

    def _launch(self) -> None:
        self._is_ready, self._reason = False, ""
        try:
            self._child = ChildProcess(
                self._module,
                reads=TrainerReport,
                environment={
                    **os.environ,
                    "OMP_NUM_THREADS": str(self._settings.threads),
                    "HF_HUB_OFFLINE": "1",
                    "TRANSFORMERS_OFFLINE": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                },
                log=self._folder / "trainer.log",
                on_report=self._on_report,
                on_exit=self._on_exit,
            )
        except OSError as error:
            self._fail(f"it cannot be started: {error}")
            return
        self._child.send(
            TrainerBoot(settings=self._settings, folder=str(self._folder), parent=os.getpid())
        )

    def _send_pending(self) -> None:
        if self._pending is not None and self._is_ready and self._child is not None:
            self._child.send(self._pending[0])

    def _on_report(self, report: TrainerReport) -> None:
        match report:
            case TrainerReady():
                self._is_ready = True
                if not self._ready.done():
                    self._ready.set_result(report)
                self._send_again(report)
                self._send_pending()
            case PartDone():
                self._part_done()
            case BatchTrained():
                self._trained(report)
            case Broken():
                self._reason = report.reason

    def _send_again(self, ready: TrainerReady) -> None:
        """Give a new process the parts of a batch that it has no checkpoint of."""
        assert self._child is not None
        self._again = 0
        for part in self._parts:
            if part.batch == ready.batches:
                self._child.send(part)
                self._again += 1

    def _part_done(self) -> None:
        if self._again:
            self._again -= 1
            return
        assert self._pending is not None, "a trainer answers orders only"
        part, then = self._pending
        assert isinstance(part, TrainPart), "a part was sent last"
        self._pending, self._deaths = None, 0
        self._parts.append(part)
        then(part.batch)

    def _trained(self, report: BatchTrained) -> None:
        assert self._pending is not None, "a trainer answers orders only"
        order, then = self._pending
        assert order.batch == report.batch, "one batch is in training at a time"
        self._pending, self._deaths = None, 0
        self._parts.clear()
        keep = {report.batch} if self._pushed is None else {report.batch, self._pushed}
        remove_but(self._folder, keep)
        self._on_batch(report.batch, report.metrics)
        then(report.batch)

    def _on_exit(self, reason: str) -> None:
        self._child = None
        if self._closing:
            self._gone.set()
            return
        self._deaths += 1
        reason = self._reason or reason
        if self._deaths >= MOST_DEATHS or not self._ready.done():
            self._fail(reason)
            return
        self.restarts += 1
        self._launch()

    def _fail(self, reason: str) -> None:
        error = TrainerFailedError(
            f"the trainer failed: {reason or 'it ended'}; see {self._folder / 'trainer.log'}"
        )
        if not self._ready.done():
            self._ready.set_exception(error)
        else:
            self._on_error(error)


def sample_of(agent: Agent) -> TrainSample:
    trained: TrainedAgent = agent  # type: ignore[assignment]
    return TrainSample(
        group=trained.group,
        tokens=pack_ids(trained.context_ids),
        spans=[(begin, end) for begin, end in trained.spans],
        logprobs=pack_floats(trained.logprobs),
        reward=trained.reward,
    )
