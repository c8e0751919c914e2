"""YAML 1.2 scalars with line numbers: 2e-6 is a number, `off` is text, a key stands once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncrl.errors import ConfigError

_CORE = (  # the core schema of YAML 1.2.2, section 10.3.2
    ("null", r"^(?:null|Null|NULL|~|)$", ["n", "N", "~", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
)
_MAX_DIGITS = 400
_MAX_DEPTH = 32


class _Loader(yaml.SafeLoader):
    """Composes nodes only; tags are resolved by the table above."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                None, None, "aliases (*name) are not supported, use ${section.key}",
                event.start_mark,
            )  # fmt: skip
        return super().compose_node(parent, index)


for _tag, _pattern, _first in _CORE:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


@dataclass(frozen=True, slots=True)
class Entry:
    """A value of a YAML file and the line it stands on (from 1)."""

    value: Any
    line: int


def read_file(path: Path) -> dict[str, Entry]:
    """The dotted keys of a YAML file in the order of the file.

    A section is among them only when it is empty or holds something else than keys.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8 or not YAML, repeats a key, or holds
            no mapping; file and line are named.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise ConfigError(
            f"{path}:{line}: byte 0x{data[e.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from e
    node = _compose(text, str(path))
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:1: expected sections such as `learner:`, got {_kind(node)}")
    entries: dict[str, Entry] = {}
    _flatten(node, "", str(path), entries, {})
    return entries


def parse_value(text: str, where: str) -> Any:
    """The value of an override, typed as in a file.

    Raises:
        ConfigError: not YAML; `where` opens the message.
    """
    node = _compose(text, where, one_line=True)
    return None if node is None else _construct(node, where, 0)


def _compose(text: str, where: str, one_line: bool = False) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        node: yaml.Node | None = loader.get_single_node()
        return node
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line = "" if one_line or mark is None else f":{mark.line + 1}"
        problem = e.problem or e.context or "malformed"
        raise ConfigError(f"{where}{line}: not valid YAML: {problem}") from e
    except yaml.reader.ReaderError as e:
        line = "" if one_line else f":{text.count(chr(10), 0, e.position) + 1}"
        char = e.character if isinstance(e.character, int) else ord(e.character[:1] or "\0")
        raise ConfigError(f"{where}{line}: not valid YAML: character U+{char:04X}") from e
    except RecursionError as e:
        raise ConfigError(f"{where}: not valid YAML: nested too deeply") from e


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f"the text {node.value[:40]!r}"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _at(where: str, node: yaml.Node) -> str:
    return f"{where}:{node.start_mark.line + 1}"


def _flatten(
    node: yaml.MappingNode, prefix: str, path: str, out: dict[str, Entry], seen: dict[str, int]
) -> None:
    if prefix.count(".") > _MAX_DEPTH:
        raise ConfigError(f"{_at(path, node)}: {prefix[:60]}... is nested too deeply")
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{_at(path, key_node)}: a key must be text, got {_kind(key_node)}")
        key = prefix + key_node.value
        line = key_node.start_mark.line + 1
        if key in seen:
            raise ConfigError(
                f"{path}:{line}: {key} is set twice (first on line {seen[key]}): keep one"
            )
        seen[key] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            _flatten(value_node, key + ".", path, out, seen)
        else:
            out[key] = Entry(_construct(value_node, path, 0), line)


def _construct(node: yaml.Node, where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{where}: nested too deeply")
    if isinstance(node, yaml.SequenceNode):
        return [_construct(n, where, depth + 1) for n in node.value]
    if isinstance(node, yaml.MappingNode):
        return {k.value: _construct(v, where, depth + 1) for k, v in node.value}
    kind = node.tag.rpartition(":")[2]
    text: str = node.value
    if kind in ("int", "float") and len(text) > _MAX_DIGITS:
        raise ConfigError(f"{_at(where, node)}: a number of {len(text)} characters is too long")
    try:
        match kind:
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
            case "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
            case "str":
                return text
    except ValueError as e:  # an explicit tag on something else, e.g. `!!int x`
        raise ConfigError(f"{_at(where, node)}: {text[:40]!r} is not of type {kind}") from e
    raise ConfigError(f"{_at(where, node)}: the tag {node.tag} is not supported")
