"""Results that say what to run, for Python and notebooks."""

from abc import abstractmethod

from heddle.config_error import ConfigError
from heddle.planning.blocks import block, framework_of
from heddle.planning.deployment import Deployment
from heddle.search.result import Judged
from heddle.search.verdict import Recommendation, verdict
from heddle.tabled import Tabled


class Answered(Tabled):
    """A result that says which engines and policy to run."""

    __slots__ = ()

    @property
    @abstractmethod
    def framework(self) -> str | None:
        """That `plan.framework` names."""

    @property
    @abstractmethod
    def answer(self) -> Recommendation | None:
        """What to run; None where nothing can be recommended."""

    @property
    @abstractmethod
    def deployment(self) -> Deployment:
        """The engines of what is recommended, and the policy over them."""

    @property
    def known_answer(self) -> Recommendation:
        """What to run.

        Raises:
            ConfigError: nothing can be recommended.
        """
        answer = self.answer
        if answer is None:
            raise ConfigError("every policy here sees the future: compare one that does not, too")
        return answer

    @property
    def verdict(self) -> str:
        """What to run, in a sentence or more."""
        return verdict(self.known_answer)

    @property
    def best(self) -> Judged:
        """The recommended setting: `setting` in words, `makespan_s`, `engines`, `candidate`."""
        return self.known_answer.judged[0]

    def export(self, framework: str | None = None) -> str:
        """Settings to paste into a framework, by default that which `plan.framework` names, or the
        recommended policy's.

        Raises:
            ConfigError: no such framework, or it cannot have these engines.
        """
        named = framework or self.framework or framework_of(self.best.candidate.policy)
        return block(self.deployment, named)
