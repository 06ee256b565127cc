"""Results with a verdict and a table, for Python and notebooks."""

from abc import ABC, abstractmethod
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


class Tabled(ABC):
    """A result with a verdict and a table."""

    __slots__ = ()

    @property
    @abstractmethod
    def verdict(self) -> str:
        """What to run, in a sentence or more."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """What was compared as JSON, the best first."""

    def to_pandas(self) -> "pd.DataFrame":
        """A row for each thing that was compared, the best first; nested keys with dots between."""
        import pandas as pd

        return pd.json_normalize(self.rows())

    def __repr__(self) -> str:
        return self.verdict

    def _repr_html_(self) -> str:
        """The verdict and the table, for notebooks."""
        table: str = self.to_pandas().to_html(index=False, float_format="{:,.4g}".format)
        return f"<p><b>{escape(self.verdict)}</b></p>{table}"
