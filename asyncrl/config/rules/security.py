"""What guards the data plane."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.rules.context import Context, Rule


def _security(c: Context) -> Iterator[str]:
    s = c.config.security
    if not s.curve:
        yield from c.inactive(
            "security.keys", why="with security.curve=false", fix="set security.curve=true"
        )
    if not s.allow_plaintext:
        return
    if s.curve:
        yield from c.inactive(
            "security.allow_plaintext", why="with security.curve=true",
            fix="set security.curve=false",
        )  # fmt: skip
    elif c.config.cluster.address is None:
        yield from c.inactive(
            "security.allow_plaintext",
            why="without cluster.address (every socket binds loopback)",
            fix="set cluster.address to a Ray cluster",
        )


RULES: tuple[Rule, ...] = (_security,)
