"""`${section.key}` in values, by omegaconf; `\\${` stands for itself."""

from __future__ import annotations

import re
from typing import Any

from asyncrl.config import fields


def interpolate(flat: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Resolve `${...}` in the values of dotted keys.

    Returns the values, and for each key that failed the reason. `${key}` alone keeps the type
    of what it points to; `${oc.env:NAME}` reads the environment.
    """
    marked = [k for k, v in flat.items() if "${" in str(v)]
    if not marked:
        return flat, {}
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    values, failed = dict(flat), {}
    # Values that are not interpolated go in as they are; a broken one must not hide the others.
    tree = OmegaConf.create({})
    for key, value in flat.items():
        try:
            plain = list(value) if isinstance(value, tuple) else value
            OmegaConf.update(tree, key, plain, force_add=True)
        except (OmegaConfBaseException, ValueError, TypeError) as e:
            failed[key] = _reason(e)
    for key in marked:
        if key in failed:
            continue
        try:
            value = OmegaConf.select(tree, key, throw_on_missing=True)
            values[key] = OmegaConf.to_container(value, resolve=True) if _is_node(value) else value
        except (OmegaConfBaseException, RecursionError) as e:
            failed[key] = _reason(e)
    return values, failed


def _is_node(value: Any) -> bool:
    from omegaconf import OmegaConf

    return bool(OmegaConf.is_config(value))


def _reason(error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if first.startswith("Interpolation key "):
        key = first.split("'")[1]
        if key in fields.leaves():
            return f"${{{key}}} points to a value that is refused itself"
        return f"${{{key}}} points to nothing; {fields.unknown(key)}; \\${{ stands for itself"
    return f"cannot be interpolated: {first}"


def escape(text: str) -> str:
    """A text that `interpolate` reads as it stands.

    >>> escape("costs ${x}")
    'costs \\\\${x}'
    """
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
