"""Fields of records in export files: what msgspec lets through when it reads one."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

# The end of the year 9999, the last that ISO-8601 can name.
TIME_MS_MAX = 253_402_300_799_999

Count = Annotated[int, Meta(ge=0, le=2**53)]
Fence = Annotated[int, Meta(ge=0, le=2**62)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Number = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Small = Annotated[int, Meta(ge=0, lt=2**32)]
Version = Annotated[int, Meta(ge=1, lt=2**32)]
Flag = Annotated[int, Meta(ge=0, le=1)]
Time = Annotated[int, Meta(ge=0, le=TIME_MS_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(min_length=1, max_length=1_000)]
