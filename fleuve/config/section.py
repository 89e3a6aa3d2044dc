"""The base of every table of settings, and the types their values have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Url = Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")]
Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """A table of the settings file: unknown keys are errors, values are not changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
