"""The schema as a flat list of dotted keys, for messages and overrides."""

from __future__ import annotations

import typing
from functools import cache
from types import NoneType
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.config.section import Section
from asyncrl.config.suggest import nearest


def _walk(model: type[Section], prefix: str) -> tuple[dict[str, Any], list[str]]:
    leaves: dict[str, Any] = {}
    sections: list[str] = []
    for name, field in model.model_fields.items():
        key = prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            below, inner = _walk(field.annotation, key + ".")
            leaves |= below
            sections += [key, *inner]
        else:
            leaves[key] = field.annotation
    return leaves, sections


@cache
def leaves() -> dict[str, Any]:
    """Each dotted key that takes a value, with its annotation, in the schema's order."""
    return _walk(Config, "")[0]


@cache
def sections() -> tuple[str, ...]:
    """Each dotted key that holds others."""
    return tuple(_walk(Config, "")[1])


def keys_of(section: str) -> list[str]:
    """The names directly below a section ("" is the top)."""
    prefix = section + "." if section else ""
    below = [k[len(prefix) :] for k in (*leaves(), *sections()) if k.startswith(prefix)]
    return list(dict.fromkeys(k.split(".")[0] for k in below))


def takes_text(key: str) -> bool:
    """True if the field holds text, so that an override is taken as it is written."""
    return _is_text(leaves()[key])


def nullable(key: str) -> bool:
    """True if null may be given."""
    return NoneType in typing.get_args(leaves()[key])


def _is_text(annotation: Any) -> bool:
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return all(isinstance(a, str) for a in args)
    return annotation is str or (
        NoneType in args and all(_is_text(a) for a in args if a is not NoneType)
    )


def unknown(key: str) -> str:
    """What to say of a key that the schema does not have: the nearest one, or its neighbours.

    >>> unknown("learner.optim.rl")
    'did you mean learner.optim.lr?'
    >>> unknown("lerner.foo")
    'did you mean learner?'
    """
    parts = key.split(".")
    depth = next((n for n in range(len(parts) - 1, 0, -1) if ".".join(parts[:n]) in sections()), 0)
    section = ".".join(parts[:depth])
    same_leaf = [k for k in leaves() if k.split(".")[-1] == parts[-1]]
    known = [k for k in (*leaves(), *sections()) if k != section]
    hint = nearest(key, known)
    top = "" if depth else nearest(parts[0], keys_of(""))
    if top and not nearest(parts[-1], [hint.rpartition(".")[2]]):
        hint = top  # only the section's name is near
    if len(same_leaf) > 1:
        same_leaf = [k for k in same_leaf if k.startswith(parts[0] + ".")]
    if 1 <= len(same_leaf) <= 3:  # a known name in the wrong section
        hint = " or ".join(same_leaf)
    if hint:
        return f"did you mean {hint}?"
    where = f"{section} has" if section else "the sections are"
    return f"{where} {', '.join(keys_of(section))}"


def as_tree(flat: dict[str, Any]) -> dict[str, Any]:
    """Nested sections from dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def flatten(config: Section, prefix: str = "") -> dict[str, Any]:
    """Each dotted key of a configuration with its value."""
    flat: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Section):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
