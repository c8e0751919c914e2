"""Plotly's JavaScript, which its Python package carries."""

from __future__ import annotations

from importlib.resources import files

from asyncrl.errors import MissingExtraError


def plotly_js() -> str:
    """The whole library, 5 MB.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError):
        raise MissingExtraError(
            "figures need plotly, which is not installed: pip install 'asyncrl[monitor]'"
        ) from None
