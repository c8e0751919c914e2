"""Colours: one set of hues that reads on light and dark, and what differs between the two."""

from __future__ import annotations

from typing import Any, Literal

Theme = Literal["light", "dark"]

HUES = (
    "#3b7dd8", "#d9742b", "#2f9e6e", "#c24d8b", "#8a6fd1", "#b08a1e", "#3aa0b0", "#8b93a1",
)  # fmt: skip
"""Of metrics within one run, or of runs side by side; at least 3:1 on both backgrounds."""

STATE_HUES = {
    "train": "#3b7dd8", "generate": "#2f9e6e", "reward": "#3aa0b0", "sync": "#d9742b",
    "eval": "#8a6fd1", "checkpoint": "#6f7fa8", "put_wait": "#b08a1e", "get_wait": "#c24d8b",
    "serve": "#5a9bd4", "idle": "#a7adb8",
}  # fmt: skip
"""Of what a process does (asyncrl.metrics.STATES), the same wherever it is drawn."""

_INKS = {
    "light": {"text": "#4a5160", "grid": "#e6e9ef", "line": "#c9ced8", "hover": "#ffffff"},
    "dark": {"text": "#a9b1bf", "grid": "#2a2f38", "line": "#434a57", "hover": "#232831"},
}
_SCALES = {
    "light": ((0, "#f4f6fa"), (0.15, "#cfe0f7"), (0.45, "#7aaae8"), (0.75, "#2f6cc4"),
              (1, "#12336b")),
    "dark": ((0, "#1d2129"), (0.15, "#1f3a63"), (0.45, "#2f6cc4"), (0.75, "#6fb0e6"),
             (1, "#f3e9b0")),
}  # fmt: skip
_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'


def template(theme: Theme) -> dict[str, Any]:
    """What `layout.template` is for a theme; figures leave everything in it open."""
    ink = _INKS[theme]
    axis = {
        "gridcolor": ink["grid"], "linecolor": ink["line"], "zerolinecolor": ink["line"],
        "zeroline": False, "automargin": True, "ticks": "",
    }  # fmt: skip
    return {
        "layout": {
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": _FONT, "size": 12, "color": ink["text"]},
            "colorway": list(HUES),
            "xaxis": axis,
            "yaxis": axis,
            "modebar": {
                "bgcolor": "rgba(0,0,0,0)", "color": ink["line"], "activecolor": ink["text"],
            },
            "hoverlabel": {
                "bgcolor": ink["hover"], "bordercolor": ink["line"],
                "font": {"family": _FONT, "size": 12, "color": ink["text"]},
            },
        },
        "data": {
            "heatmap": [{
                "colorscale": [list(stop) for stop in _SCALES[theme]],
                "colorbar": {"outlinewidth": 0, "thickness": 10, "tickformat": ".0%"},
            }],
        },
    }  # fmt: skip
