"""A section of the configuration and the types of its numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0, lt=2**31)]
NonNegative = Annotated[int, Field(ge=0, lt=2**31)]
Seconds = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["bfloat16", "float32"]


class Section(BaseModel):
    """A strict section: unknown keys and implicit conversions are errors."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False
    )
