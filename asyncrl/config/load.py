"""Reads a configuration: defaults < files < overrides, each value with where it came from.

files ► reader ┐
overrides ─────┼─► dotted keys ► interpolation ► schema (types, ranges) ► check (sense)
flags ─────────┘
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from asyncrl.config import fields, reader, sources
from asyncrl.config.check import check
from asyncrl.config.interpolate import interpolate
from asyncrl.config.schema import Config
from asyncrl.config.suggest import did_you_mean, short
from asyncrl.errors import ConfigError

DEFAULT = "default"
OVERRIDE = "override"
MAX_ERRORS = 10


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration and its origin.

    >>> load(None, ["run.steps=3"]).sources["run.steps"]
    'override'
    """

    config: Config
    sources: dict[str, str]
    """For each dotted key: "default", "FILE:LINE", "override", or the flag, e.g. "--actors"."""
    name: str = DEFAULT
    """Name of the configuration: the first file's stem, or "default"."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A value that somebody gave, and where."""

    value: Any
    source: str


def load(
    config: str | Sequence[str] | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> Resolved:
    """Read, merge and check a configuration.

    Args:
        config: a shipped name or a path, or several, of which a later one overrides what those
            before it set; None is the defaults alone.
        overrides: `key=value` with a dotted key; the last one of a key wins.
        flags: from a flag's name to its dotted key and value, e.g.
            {"--actors": ("cluster.actors", 6)}; values None are left out.

    Raises:
        ConfigError: every problem found (at most ten), one a line.
    """
    given: dict[str, _Given] = {}
    problems: list[str] = []
    names: Sequence[str] = [config] if isinstance(config, str) else config or ()
    paths = [sources.find(name) for name in names]
    for path in paths:
        _take_file(path, given, problems)
    _take_overrides(overrides, given, problems)
    _take_flags(flags or {}, given, problems)
    flat = fields.flatten(Config()) | {k: g.value for k, g in given.items()}
    where = {k: given[k].source if k in given else DEFAULT for k in flat}
    flat, failed = interpolate(flat)
    problems += [f"{_named(k, given[k].value, where[k])}: {why}" for k, why in failed.items()]
    valid = _validate({k: v for k, v in flat.items() if k not in failed}, where, problems)
    if problems or valid is None:
        raise _error(problems)
    check(valid, where)
    return Resolved(valid, where, paths[0].stem if paths else DEFAULT)


def _error(problems: list[str]) -> ConfigError:
    more = len(problems) - MAX_ERRORS
    tail = [f"and {more} more"] if more > 0 else []
    return ConfigError("\n".join(problems[:MAX_ERRORS] + tail))


def _named(key: str, value: Any, source: str) -> str:
    at = "" if source == DEFAULT else f" ({source})"
    return f"{key}={show(value)}{at}"


def show(value: Any) -> str:
    """A value as YAML would have it, on one line."""
    if value is None or isinstance(value, (bool, list, tuple, dict)):
        return short(json.dumps(value, ensure_ascii=False))
    return short(str(value))


def _take_file(path: Path, given: dict[str, _Given], problems: list[str]) -> None:
    shown = sources.shown(path)
    entries = reader.read_file(path)
    if sources.is_resolved(path):
        shown += sources.RESOLVED_MARK
    for key, entry in entries.items():
        place = f"{shown}:{entry.line}"
        if key in fields.leaves():
            given[key] = _Given(entry.value, place)
        elif key in fields.sections():
            if entry.value not in (None, {}):
                problems.append(f"{key}={show(entry.value)} ({place}): {_is_section(key)}")
        else:
            problems.append(f"{key} ({place}): {_not_a_key(key)}")


def _not_a_key(key: str) -> str:
    leaf = next((k for k in fields.leaves() if key.startswith(k + ".")), None)
    if leaf is not None:
        return f"{leaf} takes a value, not keys below it"
    return f"unknown key; {fields.unknown(key)}"


def _is_section(key: str) -> str:
    first = next(k for k in fields.leaves() if k.startswith(key + "."))
    return (
        f"{key} is a section, set its keys one by one, e.g. {first}=... "
        f"(keys: {', '.join(fields.keys_of(key))})"
    )


def _take_overrides(
    overrides: Sequence[str], given: dict[str, _Given], problems: list[str]
) -> None:
    for text in overrides:
        key, equals, raw = text.partition("=")
        key = key.strip()
        if not equals or not key:
            hint = did_you_mean(key, fields.leaves())
            problems.append(
                f"{short(text)!r}: expected key=value, e.g. learner.optim.lr=2e-6{hint}"
            )
        elif key in fields.sections():
            problems.append(f"{key}={short(raw)} (override): {_is_section(key)}")
        elif key not in fields.leaves():
            problems.append(f"{key} (override): {_not_a_key(key)}")
        else:
            try:
                given[key] = _Given(parse_override(key, raw), OVERRIDE)
            except ConfigError as e:
                problems.append(str(e))


def parse_override(key: str, raw: str) -> Any:
    """The value of `key=raw`: text fields take it as it stands, others read it as YAML.

    Quotes around a text are taken off, and null is null where the field may be null.

    >>> parse_override("task.prompt_template", "Q: {prompt}")
    'Q: {prompt}'
    >>> parse_override("learner.optim.lr", "2e-6")
    2e-06
    """
    if not fields.takes_text(key) or "${" in raw:
        return raw if "${" in raw else reader.parse_value(raw, f"{key}={short(raw)} ({OVERRIDE})")
    if fields.nullable(key) and raw in ("null", "~"):
        return None
    if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\"":
        return reader.parse_value(raw, f"{key}={short(raw)} ({OVERRIDE})")
    return raw


def _take_flags(
    flags: Mapping[str, tuple[str, Any]], given: dict[str, _Given], problems: list[str]
) -> None:
    for flag, (key, value) in flags.items():
        if value is None:
            continue
        before = given.get(key)
        if before is not None and before.source == OVERRIDE and before.value != value:
            problems.append(
                f"{flag} {value} and {key}={show(before.value)} (override) contradict: give one"
            )
        given[key] = _Given(value, flag)


def _validate(flat: dict[str, Any], where: Mapping[str, str], problems: list[str]) -> Config | None:
    broken = [k for k, v in flat.items() if isinstance(v, str) and not _is_unicode(v)]
    problems += [f"{k} ({where[k]}): not valid UTF-8" for k in broken]
    flat = {k: v for k, v in flat.items() if k not in broken}
    try:
        # Through JSON: strict, but a list may stand for a tuple.
        return Config.model_validate_json(json.dumps(fields.as_tree(flat)))
    except ValidationError as e:
        for error in e.errors(include_url=False):
            names = [str(part) for part in error["loc"]]
            key = next(k for n in range(len(names), 0, -1) if (k := ".".join(names[:n])) in flat)
            value = flat[key]
            text = f"{_named(key, value, where[key])}: {_expected(error, value)}"
            if error["type"] == "tuple_type" and isinstance(value, (str, int, float)):
                text += _as_list(key, value, where[key])
            problems.append(text)
        return None


def _as_list(key: str, value: Any, source: str) -> str:
    """How to write a list of what was given, where it was given."""
    items = str(value).strip("()").replace(",", " ").split()
    if source == OVERRIDE:
        return f": write '{key}=[{','.join(items)}]', in quotes for the shell"
    return f": write [{', '.join(items)}]"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_TYPES = {
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "int_parsing_size": "the number is too large",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "tuple_type": "expected a list",
    "missing": "the list is too short",
    "none_required": "expected null",
}
_RANGES = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}


def _expected(error: ErrorDetails, value: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in _RANGES:
        name, words = _RANGES[kind]
        return f"{words} {context[name]}"
    if kind == "literal_error":
        expected = str(context["expected"]).replace("'", "")
        return f"expected {expected}{did_you_mean(str(value), expected.replace(',', '').split())}"
    if kind == "too_long":
        return f"expected a list of {context['max_length']}, got {context['actual_length']}"
    text = _TYPES.get(kind, error["msg"])
    if kind in ("finite_number", "missing", "int_parsing_size"):
        return text
    if isinstance(value, float) and kind == "int_type" and value.is_integer():
        return f"{text}: write {value:.0f}"
    if kind == "string_type" and isinstance(value, (int, float)):
        return f"{text}, got a {type(value).__name__}: put it in quotes"
    if kind == "bool_type" and str(value).lower() in ("on", "yes", "off", "no"):
        return f"{text}: write {str(str(value).lower() in ('on', 'yes')).lower()}"
    return f"{text}, got {_kind(value)}"


def _kind(value: Any) -> str:
    names = {"str": "text", "NoneType": "null", "dict": "a section", "list": "a list",
             "bool": "true/false", "int": "a number", "float": "a number"}  # fmt: skip
    return names.get(type(value).__name__, type(value).__name__)
