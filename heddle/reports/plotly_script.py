"""Plotly's script, which every page holds."""

from importlib.resources import files


def plotly_script() -> str:
    """The file that a wheel of Heddle has, or in a checkout that of the package plotly.

    Raises:
        ModuleNotFoundError: neither is there.
    """
    shipped = files("heddle.reports") / "plotly.min.js"
    if shipped.is_file():
        return shipped.read_text(encoding="utf-8")
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    script: str = get_plotlyjs()
    return script
