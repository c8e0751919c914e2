"""Start a run, watch it, end it."""

from asyncrl.launch.run import launch

__all__ = ["launch"]
