"""What every message has."""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = 3
"""Version of the wire format; a message of another one is refused."""

State = Literal["running", "stopping", "done"]


class Message(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True
):
    """Fields that every message has."""

    schema: int = SCHEMA
    req: int = 0
    """Number of the request; a reply carries the number of what it answers."""
