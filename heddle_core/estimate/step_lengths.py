"""Step lengths of a task: by trajectory, by group and in all, each shrunk towards the next."""

import math
from dataclasses import dataclass

# Variances of the natural log of a step's tokens, assumed until data outweigh them: between steps
# of a trajectory, between trajectories of a group, between groups. Near those of recorded agents.
_STEPS, _TRAJECTORIES, _GROUPS = 0.5, 0.1, 0.2
_PRIOR_WEIGHT = 10.0  # observations
_LEAST_SHARE = 0.01  # of the variance between steps: keeps a level from vanishing by chance


@dataclass(slots=True)
class RunningMean:
    count: int = 0
    mean: float = 0.0

    def add(self, x: float) -> float:
        """Add one value; return by how much the sum of squared deviations grows (Welford)."""
        self.count += 1
        before = x - self.mean
        self.mean += before / self.count
        return before * (x - self.mean)


class StepLengths:
    """Log lengths of one task's steps: ``mean + group + trajectory + step``, all but one random.

    A level is estimated by its mean times ``n / (n + noise / signal)``: the best linear unbiased
    prediction of a random effect, with the group taken as if each of its steps came from another
    trajectory. The three variances are estimated from sums of squares as the steps come in.
    """

    def __init__(self) -> None:
        self._all = RunningMean()
        self._squares_own = self._squares_group = self._squares_all = 0.0
        self._free_own = self._free_group = 0
        self._own_ratio = _STEPS / _TRAJECTORIES
        self._group_ratio = (_STEPS + _TRAJECTORIES) / _GROUPS

    def add(self, own: RunningMean, group: RunningMean, tokens: int) -> None:
        """Add one step of a trajectory and its group; the caller keeps their means."""
        x = math.log(max(1, tokens))
        self._squares_own += own.add(x)
        self._squares_group += group.add(x)
        self._squares_all += self._all.add(x)
        self._free_own += own.count > 1
        self._free_group += group.count > 1
        weight, free_all = _PRIOR_WEIGHT, self._all.count
        steps = (weight * _STEPS + self._squares_own) / (weight + self._free_own)
        in_group = weight * (_STEPS + _TRAJECTORIES) + self._squares_group
        in_group /= weight + self._free_group
        in_all = weight * (_STEPS + _TRAJECTORIES + _GROUPS) + self._squares_all
        in_all /= weight + free_all
        least = max(_LEAST_SHARE * steps, 1e-6)
        self._own_ratio = steps / max(in_group - steps, least)
        self._group_ratio = in_group / max(in_all - in_group, least)

    def deviation(self, own: RunningMean, group: RunningMean) -> float:
        """Estimate by how much a trajectory's log step length exceeds the mean of all."""
        of_group = (group.mean - self._all.mean) * group.count / (group.count + self._group_ratio)
        rest = own.mean - self._all.mean - of_group
        return of_group + rest * own.count / (own.count + self._own_ratio)

    def typical_tokens(self, deviation: float) -> float:
        """Median tokens of a step at this deviation; 0 before the first step."""
        return math.exp(self._all.mean + deviation) if self._all.count else 0.0
