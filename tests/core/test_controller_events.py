"""The controller and the driver know every event and command."""

from typing import Any, get_args

from heddle_core.commands import Command, LoopCommand
from heddle_core.controller import Controller
from heddle_core.events import Event, LoopEvent
from heddle_core.presets import verl
from heddle_rollout.driver import Driver
from heddle_sim.calendar import Calendar
from tests.core.policy_fakes import policy_context


def test_the_controller_takes_every_event() -> None:
    controller = Controller(verl(policy_context()))
    assert set(controller._on) == set(get_args(Event)) - set(get_args(LoopEvent))


def test_the_driver_executes_every_command() -> None:
    controller: Any = Controller(verl(policy_context()))
    driver = Driver(controller, launcher=None, clock=Calendar())  # type: ignore[arg-type]
    assert set(driver._handlers) == set(get_args(Command)) - set(get_args(LoopCommand))
