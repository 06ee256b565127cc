"""Any order of what clients and trainers do: no step is lost, none stays, and the core agrees."""

import asyncio
import random
from itertools import count

import pytest

from heddle_verl.dispatcher import StepFailedError
from tests.verl.one_loop import Handle, World, in_virtual_time


class Crowded:
    """Clients that run, give up and end at random times, over engines that come and go."""

    def __init__(self, seed, *, proxy):
        self.random = random.Random(seed)
        self.proxy = proxy
        self.world = World(2, slots=2, aborts=proxy, ends="announced", idle_s=3.0)
        self.dispatcher = self.world.dispatcher
        self.added = 0
        self.steps = 0

    async def client(self, name):
        for step in range(self.random.randrange(1, 5)):
            call = self.world.begin(
                name, 50 + 100 * step, resumable=self.random.random() < 0.8, max_tokens=64
            )
            # Without a proxy nobody can report that.
            if self.proxy and self.random.random() < 0.05:
                self.dispatcher.failed(call, "given up at once")
                return
            try:
                await self.step(name, call)
            except StepFailedError:
                return
            await asyncio.sleep(self.random.choice([0.0, 0.1, 5.0]))
        if self.random.random() < 0.8:
            self.dispatcher.finish([name])

    async def step(self, name, call):
        if not self.proxy:
            grant = await asyncio.shield(call.waiter)
            await asyncio.sleep(self.random.random())
            late = self.random.choice([0.0, 0.0, 0.05])
            loop = asyncio.get_running_loop()
            loop.call_later(late, self.dispatcher.release, grant.address, name)
            self.steps += 1
            return
        while True:
            grant = await asyncio.shield(call.waiter)
            await asyncio.sleep(self.random.random())
            chance = self.random.random()
            if chance < 0.03:
                self.dispatcher.failed(call, "given up")
                return
            if chance < 0.06:
                self.dispatcher.engine_died(call, grant.request_id, "dead")
                continue
            aborted = grant.request_id in self.world.aborted or chance > 0.95
            if not self.dispatcher.dispatch_ended(call, grant.request_id, 8, aborted=aborted):
                self.steps += 1
                return

    async def trainer(self):
        for _ in range(12):
            await asyncio.sleep(self.random.random() * 2)
            engines = list(self.dispatcher.in_flight)
            what = self.random.randrange(3)
            if what == 0 or not engines:
                self.added += 1
                self.dispatcher.add_engines({f"new{self.added}": Handle()})
            elif what == 1:
                self.dispatcher.remove_engines([self.random.choice(engines)])
            else:
                self.dispatcher.redistribute(end_idle=self.random.random() < 0.5)
        for number in count():
            if not self.dispatcher.in_flight:
                self.dispatcher.add_engines({f"last{number}": Handle()})
            await asyncio.sleep(1.0)


@pytest.mark.parametrize("proxy", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_whatever_clients_and_trainers_do_every_step_ends(seed, proxy):
    @in_virtual_time
    async def run():
        crowded = Crowded(seed, proxy=proxy)
        trainer = asyncio.ensure_future(crowded.trainer())
        clients = [crowded.client(f"r{n}") for n in range(24)]
        await asyncio.wait_for(asyncio.gather(*clients), 300.0)
        await asyncio.sleep(60.0)
        trainer.cancel()
        dispatcher = crowded.dispatcher
        assert dispatcher._error is None
        assert sum(dispatcher.in_flight.values()) == dispatcher.waiting == dispatcher.idle == 0
        assert dispatcher._sessions == dispatcher._requests == {}
        arrived = {e.trajectory for e in crowded.world.of("TrajectoryArrived")}
        ended = [e.trajectory for e in crowded.world.of("TrajectoryFinished")]
        assert sorted(ended) == sorted(arrived)
        assert crowded.steps > 20

    run()
