"""Engines and clients of a dispatcher in one event loop, without Ray."""

import asyncio
import functools
from types import SimpleNamespace

from heddle_core.events import Event
from heddle_runtime.virtual_time import run_virtual
from heddle_verl.dispatcher import Dispatcher
from heddle_verl.settings import EngineFacts, prepare_router, read_settings
from heddle_verl.steps import SampleIdentity, StepPrompt

NOBODY = SampleIdentity()


class Handle(SimpleNamespace):
    """An engine of verl; it has the method of a real one that says that it can abort."""

    def abort_request(self):
        """Called through the dispatcher's `abort`."""


class World:
    """A dispatcher, its engines and its journal."""

    def __init__(self, engines=2, *, slots=2, policy="heddle", aborts=False, **settings):
        values = {"model": "qwen3-14b", "gpu": "h100", "policy": policy, **settings}
        facts = EngineFacts(tp=1, max_running=slots, max_context=32_768)
        prepared = prepare_router(read_settings(values), facts, engines)
        self.events: list[Event] = []
        self.commands: list = []
        self.aborted: list[str] = []
        self.knows = True
        self.dispatcher = Dispatcher(
            prepared, abort=self._abort if aborts else None, sink=self._record
        )
        self.dispatcher.add_engines({f"a{i}": Handle(name=f"a{i}") for i in range(engines)})

    def _record(self, event, commands):
        self.events.append(event)
        self.commands += commands

    async def _abort(self, handle, request_id):
        self.aborted.append(request_id)
        return self.knows

    def begin(self, request_id, tokens=100, *, group="g", identity=NOBODY, **prompt):
        prompt = StepPrompt(tokens=tokens, group=group, **prompt)
        return self.dispatcher.request(request_id, prompt, identity)

    def of(self, kind):
        return [event for event in self.events if type(event).__name__ == kind]


async def settle(times=20):
    """Let everything happen that needs no time."""
    for _ in range(times):
        await asyncio.sleep(0)
    await asyncio.sleep(0.005)


def asynchronous(test):
    """Run a test in an event loop."""
    return _run_by(asyncio.run, test)


def in_virtual_time(test):
    """Run a test in an event loop whose clock jumps to the next timer."""
    return _run_by(run_virtual, test)


def _run_by(run, test):
    @functools.wraps(test)
    def whole(*args, **kwargs):
        run(asyncio.wait_for(test(*args, **kwargs), 600.0))

    return whole
