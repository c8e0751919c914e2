"""Refuses settings that are well typed and cannot work: inactive, half set, or deadlocking.

Nothing is imported, opened or probed. Every message has the field, its value, the
reason and the fix. The rules are in `asyncrl.config.rules`, a file for each subject;
`asyncrl.preflight` checks what needs the disk or the machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config import fields
from asyncrl.config.rules import (
    correcting,
    crediting,
    data,
    fleet,
    holding,
    learning,
    owned,
    run,
    security,
)
from asyncrl.config.rules.context import Context
from asyncrl.config.rules.data import EVEN_DIGITS_PROMPTS, REWARDS
from asyncrl.config.rules.run import BUILT_IN_MODELS
from asyncrl.config.schema import Config
from asyncrl.config.sources import shipped
from asyncrl.errors import ConfigError

__all__ = ["BUILT_IN_MODELS", "EVEN_DIGITS_PROMPTS", "REWARDS", "check"]

_RULES = (
    *run.RULES, *owned.RULES, *learning.RULES, *correcting.RULES, *crediting.RULES, *holding.RULES,
    *data.RULES, *fleet.RULES, *security.RULES,
)  # fmt: skip


def check(
    config: Config, sources: Mapping[str, str] | None = None, device: str | None = None
) -> None:
    """Refuse a configuration that cannot work.

    Args:
        config: the configuration.
        sources: where each value came from; without it no field counts as set by somebody.
        device: cpu or cuda when `cluster.device: auto` has been resolved.

    Raises:
        ConfigError: every refusal (at most ten), one a line.
    """
    context = Context(
        config, sources or {}, fields.flatten(config), device or config.cluster.device,
        frozenset(f"{name}.yaml" for name in shipped()),
    )  # fmt: skip
    problems = [text for rule in _RULES for text in rule(context)]
    if problems:
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise ConfigError("\n".join(problems[:10] + more))
