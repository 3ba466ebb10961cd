"""The sections `model` and `architectures` of a study file: what is compared, and at which size."""

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from basecap.data.config import Count, Line
from basecap.names import split_backbone
from basecap.study.value_errors import shown

#: Sizes beyond any machine's, which would be planned for hours or not fit into a number.
WIDEST, DEEPEST = 2**20, 2**10


class Section(BaseModel):
    """Base class of sections: frozen, unknown keys are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SizeConfig(Section):
    """How large the models are."""

    hidden: Count = Field(ge=1, le=WIDEST, description="model width")
    layers: Count | None = Field(
        None,
        ge=1,
        le=DEEPEST,
        description="depth in Transformer layers (blocks without feed-forward layer count half); "
        "the published depth of each family when not given",
    )
    heads: Count | None = Field(
        None,
        ge=1,
        le=WIDEST,
        description="heads of mixers with this option, unless their variant or the entry sets it; by default their own",
    )
    vocab: Count | None = Field(None, ge=2, le=2**31, description="vocabulary; the tokenizer's when not given")
    tied: bool | None = Field(None, description="tie head and embedding; the family's choice when not given")


class SizeOverride(Section):
    """What one architecture's size differs in."""

    hidden: Count | None = Field(None, ge=1, le=WIDEST, description="model width; the study's when not given")
    layers: Count | None = Field(
        None, ge=1, le=DEEPEST, description="depth in Transformer layers; the study's when not given"
    )
    tied: bool | None = Field(None, description="tie head and embedding; the study's choice when not given")


class PatternEntry(Section):
    """One layer of a pattern."""

    use: str = Field(description="name of an architecture, see `basecap list mixers`")
    mixer: dict[str, Any] = Field(default_factory=dict, description="options of the mixer")

    @field_validator("use")
    @classmethod
    def _has_no_backbone(cls, value: str) -> str:
        if split_backbone(value)[1] is not None:
            raise ValueError("a layer of a pattern has no backbone of its own; set the entry's backbone")
        return value


class ArchitectureEntry(Section):
    """One series of the comparison."""

    name: Line = Field(description="as it appears in the report")
    use: str = Field(description="name of an architecture, see `basecap list mixers`; also in another backbone: X in Y")
    mixer: dict[str, Any] = Field(default_factory=dict, description="options of the mixer")
    backbone: str | None = Field(None, description="another backbone, see `basecap list backbones`")
    canon: str | None = Field(
        None,
        description="places of Canon layers in every block, such as abcd: a before the mixer, b on queries, keys and "
        "values, c before the feed-forward layer, d in it; those of the architecture when not given",
    )
    layers: tuple[PatternEntry, ...] | None = Field(
        None, min_length=1, description="layer pattern, repeated to the depth"
    )
    model: SizeOverride = Field(default_factory=SizeOverride)
    train: dict[str, Any] = Field(default_factory=dict, description="training options that differ, such as lr")
    tasks: tuple[Line, ...] | None = Field(
        None, min_length=1, description="training tasks of this architecture, among task.train (default: all of them)"
    )
    control: bool = Field(
        False, description="whether it is known to be worse: the report says whether the study sees that; of text only"
    )

    @field_validator("canon")
    @classmethod
    def _places_in_order(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch("a?b?c?d?", value):
            raise ValueError(f"{value!r} must be places of Canon layers, a to d in this order, such as abcd or ac")
        return value

    @field_validator("layers", mode="before")
    @classmethod
    def _names_are_entries(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [{"use": item} if isinstance(item, str) else item for item in value]
        return value


def entry_keys(item: Any) -> Any:
    """Return the keys of an entry of `architectures`: its name alone stands for all of them."""
    entry = {"use": item} if isinstance(item, str) else item
    if not isinstance(entry, dict):
        raise ValueError(f"{shown(item)} is not one architecture; write its name, or its keys such as {{use: name}}")
    named = [entry[key] for key in ("name", "use") if key in entry]
    if not named:
        return entry
    if "layers" in entry and "use" not in entry:
        raise ValueError(f"{named[0]!r} has layers and no use; add one, such as use: transformer++, for its backbone")
    use, backbone = split_backbone(str(named[-1]))
    if backbone is not None and "backbone" in entry:
        raise ValueError(f"{named[-1]!r} names a backbone, and so does the key backbone; leave out one of them")
    if backbone is not None:
        return {"name": named[0], **entry, "use": use, "backbone": backbone}
    return {"name": str(named[0]), "use": named[-1], **entry}
