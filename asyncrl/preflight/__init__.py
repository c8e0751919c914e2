"""Before any process starts: what can be known (checks.py) and the plan (plan.py)."""

from asyncrl.preflight.checks import Preflight, preflight
from asyncrl.preflight.plan import describe

__all__ = ["Preflight", "describe", "preflight"]
