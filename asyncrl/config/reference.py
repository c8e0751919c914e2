"""docs/configuration.md from the schema: every key with its type, default and meaning."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator

from asyncrl.config import learning, schema, tracing
from asyncrl.config.schema import Config
from asyncrl.config.section import Section

HEAD = """# Configuration

Every key, as `asyncrl config reference` prints it. A YAML file holds sections and keys; of several
`--config` a later one overrides an earlier one, and `section.key=value` overrides them all.
`asyncrl config show` prints the resolved values with where each came from. A list is written as in
YAML, e.g. `'cluster.actor_places=["local:0,1", "local:2,3"]'` in a shell. What the losses, weights,
masks and estimators of `learner` are, and which go together: [corrections.md](corrections.md).
"""


def reference() -> str:
    """The whole page, in Markdown."""
    docs = _docstrings()
    parts = [HEAD]
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type)
        parts.append(f"## {name}\n\n{docs[(section.__name__, '')]}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        parts.append("\n".join(_rows(section, name, docs)) + "\n")
    return "\n".join(parts)


def _rows(section: type, prefix: str, docs: dict[tuple[str, str], str]) -> Iterator[str]:
    assert issubclass(section, Section)
    source = _annotations(section)
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _rows(inner, f"{prefix}.{name}", docs)
            continue
        default = field.default
        shown = default if isinstance(default, str) else json.dumps(default)
        kind = source[name].replace("|", "\\|")
        meaning = docs[(section.__name__, name)].replace("|", "\\|")
        yield f"| `{prefix}.{name}` | {kind} | `{shown}` | {meaning} |"


def _classes() -> dict[str, ast.ClassDef]:
    trees = [ast.parse(inspect.getsource(module)) for module in (schema, learning, tracing)]
    nodes = (node for tree in trees for node in tree.body)
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def _annotations(section: type) -> dict[str, str]:
    """The annotation of each field, as the schema writes it."""
    body = _classes()[section.__name__].body
    return {
        node.target.id: _plain(node.annotation)
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _plain(annotation: ast.expr) -> str:
    """`Annotated[float, Field(gt=0)] | None` as "float, gt=0 | null"."""
    if isinstance(annotation, ast.BinOp):
        return f"{_plain(annotation.left)} | {_plain(annotation.right)}"
    if isinstance(annotation, ast.Constant):
        return "null"
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice
        elements = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        kind = ast.unparse(annotation.value)
        if kind == "Literal":
            return " / ".join(ast.literal_eval(e) for e in elements)
        if kind == "Annotated":
            field = elements[1]
            assert isinstance(field, ast.Call)
            limits = ", ".join(f"{k.arg}={ast.unparse(k.value)}" for k in field.keywords)
            return f"{_plain(elements[0])}, {limits}"
    names = {"tuple[str, ...]": "list of texts", "tuple[Decay, Decay]": "two of 0 <= float < 1",
             "Positive": "int, from 1", "NonNegative": "int, from 0", "Seconds": "seconds",
             "Dtype": "bfloat16 / float32", "str": "text", "bool": "true / false",
             "InFlightMode": "keep / keep_kv / abort / wait"}  # fmt: skip
    text = ast.unparse(annotation)
    return names.get(text, text)


def _docstrings() -> dict[tuple[str, str], str]:
    """(class, field) to the string below the field; (class, "") to the class's own."""
    found = {}
    for name, node in _classes().items():
        found[(name, "")] = ast.get_docstring(node) or ""
        for field, after in zip(node.body, node.body[1:], strict=False):
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                continue
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found[(name, field.target.id)] = " ".join(str(after.value.value).split())
    return found
