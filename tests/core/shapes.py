"""Engine shapes and GPUs of the one class that the tests of solvers use."""

from heddle_core.ids import EngineShape


def h100(tp: int) -> EngineShape:
    return EngineShape("h100", tp)


def h100s(gpus: int) -> dict[str, int]:
    return {"h100": gpus}
