"""The study file: read, completed, checked. Nothing runs and nothing is written here."""

import datetime
import difflib
import json
import re
import reprlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from basecap.data.config import Count, DataConfig, Line, Number
from basecap.data.tokenizer import BYTES
from basecap.errors import ConfigError, in_words, nearest
from basecap.files import parse_yaml
from basecap.moved_keys import with_moved_keys
from basecap.names import PAPER, at_scale, split_body
from basecap.study.figure import FigureConfig, PublishedConfig
from basecap.study.reading import READ_ONLY, apply_setting, read_study
from basecap.train.config import TrainSection

#: Names of studies: they become directories.
NAME = re.compile(r"\w[\w .+,=-]{0,99}")

#: Batches are drawn by the hash of a seed of 64 bits.
Seed = Annotated[Count, Field(ge=-(2**63), lt=2**63)]

#: Sizes beyond any machine's, which would be planned for hours or not fit into a number.
WIDEST, DEEPEST = 2**20, 2**10

#: Shows values that are wrong: the beginning of long ones.
_BEGINNING = reprlib.Repr()
_BEGINNING.maxstring, _BEGINNING.maxother, _BEGINNING.maxlevel = 100, 100, 3


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SizeConfig(_Section):
    """How large the models are."""

    hidden: Count = Field(ge=1, le=WIDEST, description="model width")
    layers: Count | None = Field(
        None,
        ge=1,
        le=DEEPEST,
        description="depth in Transformer layers (blocks without feed-forward layer count half); "
        "the published depth of each family when not given",
    )
    vocab: Count | None = Field(None, ge=2, le=2**31, description="vocabulary; the tokeniser's when not given")
    tied: bool | None = Field(None, description="tie head and embedding; the family's choice when not given")


class SizeOverride(_Section):
    """What one architecture's size differs in."""

    hidden: Count | None = Field(None, ge=1, le=WIDEST, description="model width; the study's when not given, as below")
    layers: Count | None = Field(None, ge=1, le=DEEPEST, description="depth in Transformer layers")
    tied: bool | None = Field(None, description="tie head and embedding")


class PatternEntry(_Section):
    """One layer of a pattern."""

    use: str = Field(description="name of an architecture, see `basecap list mixers`")
    mixer: dict[str, Any] = Field(default_factory=dict, description="options of the mixer")

    @field_validator("use")
    @classmethod
    def _is_no_body(cls, value: str) -> str:
        if split_body(value)[1] is not None:
            raise ValueError("a layer of a pattern has no body of its own; set the entry's backbone")
        return value


class ArchitectureEntry(_Section):
    """One series of the comparison."""

    name: Line = Field(description="as it appears in the report")
    use: str = Field(description="name of an architecture, see `basecap list mixers`; also in another's body: X in Y")
    mixer: dict[str, Any] = Field(default_factory=dict, description="options of the mixer")
    backbone: str | None = Field(None, description="another block family, see `basecap list backbones`")
    layers: tuple[PatternEntry, ...] | None = Field(
        None, min_length=1, description="layer pattern, repeated to the depth"
    )
    model: SizeOverride = Field(default_factory=SizeOverride)
    train: dict[str, Any] = Field(default_factory=dict, description="training options that differ, such as lr")

    @field_validator("layers", mode="before")
    @classmethod
    def _names_are_entries(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [{"use": item} if isinstance(item, str) else item for item in value]
        return value


#: What a gap may cost and still keep the capability, the same in every study: a tenth of the reference's tokens. How
#: many nats that is follows from the reference's own training, so it means the same at every size.
COST = 0.1


class GapConfig(_Section):
    """What the verdict means."""

    model_config = ConfigDict(serialize_by_alias=True)  # `from` is a word of Python

    cost: Number = Field(
        COST,
        gt=0,
        lt=1,
        description="share of the reference's tokens that a gap may be worth and still count as keeping the capability",
    )
    start: Number = Field(
        0.5,
        gt=0,
        lt=1,
        alias="from",
        description="share of its tokens after which the reference counts as trained and the gap is measured",
    )


class StudyConfig(_Section):
    """A complete study."""

    name: str = Field(description="what the report is called, and with --scale its directory below runs/")
    summary: str = Field("", description="one line for `basecap list studies`")
    scale: str | None = Field(
        None, description="which of its `scales` a study has, see --scale; paper when it has any and this is not given"
    )
    data: DataConfig
    model: SizeConfig
    train: TrainSection
    seeds: tuple[Seed, ...] = Field((0,), min_length=1, description="one run per architecture and seed")
    reference_seeds: tuple[Seed, ...] | None = Field(
        None, min_length=1, description="all seeds of the reference, which stands in every row; as seeds when not given"
    )
    architectures: tuple[ArchitectureEntry, ...] = Field(
        min_length=1, description="what is compared: names, or entries with the keys below"
    )
    reference: str = Field("transformer++", description="the architecture the others are compared with")
    evals: tuple[str | dict[str, Any], ...] = Field(
        ("domain-loss",), min_length=1, description="names, see `basecap list evals`, or name: {option: value}"
    )
    gap: GapConfig = Field(default_factory=GapConfig)
    figure: FigureConfig | None = Field(None, description="the paper's figure that the report draws; changes no number")

    @field_validator("name")
    @classmethod
    def _name_is_a_directory(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(
                "a name begins with a letter or digit and holds letters, digits, spaces and _ . + , = - only"
            )
        return value

    @property
    def directory(self) -> Path:
        """Where the study runs unless told otherwise."""
        return Path("runs") / (self.name if self.scale in (None, PAPER) else f"{self.name}-{self.scale}")

    @property
    def title(self) -> str:
        """The study's name with its scale."""
        return at_scale(self.name, self.scale)

    @field_validator("seeds", "reference_seeds")
    @classmethod
    def _seeds_differ(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and len(set(value)) < len(value):
            raise ValueError("a seed is named twice; remove one")
        return value

    @field_validator("evals", mode="before")
    @classmethod
    def _names_are_evaluations(cls, value: Any) -> Any:
        for entry in value if isinstance(value, list | tuple) else ():
            named = isinstance(entry, dict) and all(isinstance(key, str) for key in entry)
            if not named and not isinstance(entry, str):
                wanted = "write its name, or its name: {option: value}"
                raise ValueError(f"{_shown(entry)} is not one evaluation; {wanted}")
        return value

    @field_validator("architectures", mode="before")
    @classmethod
    def _names_are_architectures(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [_entry(item) for item in value]
        return value

    @field_validator("architectures")
    @classmethod
    def _names_differ(cls, value: tuple[ArchitectureEntry, ...]) -> tuple[ArchitectureEntry, ...]:
        names = [entry.name for entry in value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two entries are called {name!r}; give one another name")
        return value

    @model_validator(mode="after")
    def _vocabulary_fits(self) -> "StudyConfig":
        needed = {"bytes": BYTES, "bpe": self.data.vocab}.get(self.data.tokenizer, 0)
        if self.model.vocab is not None and self.model.vocab < needed:
            raise ConfigError(
                f"model.vocab = {self.model.vocab} is less than the tokeniser's {needed}; set at least that."
            )
        return self

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """Return the seeds that the architecture `name` is trained with."""
        return self.reference_seeds if self.reference_seeds and name == self.reference else self.seeds


def _entry(item: Any) -> Any:
    entry = {"use": item} if isinstance(item, str) else item
    if not isinstance(entry, dict):
        raise ValueError(f"{_shown(item)} is not one architecture; write its name, or its keys such as {{use: name}}")
    named = [entry[key] for key in ("name", "use") if key in entry]
    if not named:
        return entry
    use, body = split_body(str(named[-1]))
    if body is not None and "backbone" in entry:
        raise ValueError(f"{named[-1]!r} names a body, and so does backbone; leave out one of them")
    if body is not None:
        return {"name": named[0], **entry, "use": use, "backbone": body}
    return {"name": str(named[0]), "use": named[-1], **entry}


def load_study(study: str, settings: Sequence[str] = (), scale: str | None = None) -> StudyConfig:
    """Read a built-in study by name or a YAML file.

    Args:
        study: name in the library, or path of a file.
        settings: "a.b=value" overrides, the value in YAML; they come after those of the scale.
        scale: which of its sizes; the paper's, or what the file says under `scale`, when not given.

    Raises:
        ConfigError: unknown study, scale, key or name, impossible value; with the place and the nearest valid name.
    """
    content = read_study(study, scale)
    for setting in settings:
        apply_setting(content, setting)
    chosen = content.get("scale")
    where = study if chosen in (None, PAPER) else f"{study} at scale {chosen}"
    config = validate(with_moved_keys(content, "--set train"), where)
    names = [entry.name for entry in config.architectures]
    if config.reference not in names:
        from basecap.mixers import ARCHITECTURES  # imports torch, which a study alone does not need

        for entry in config.architectures:  # a misspelt name is no other reference
            ARCHITECTURES.get(entry.use)
        other = (difflib.get_close_matches(config.reference, names, n=1) or names)[0]
        raise ConfigError(
            f"study {study}: the reference {config.reference!r} is not among the architectures; add it to them, or "
            f"compare with another: --set {shlex.quote(f'reference={other}')}."
        )
    return config


def select(study: StudyConfig, only: Sequence[str]) -> set[str]:
    """Return the names of the architectures to run: those in `only` and the reference; all when `only` is empty."""
    names = {entry.name for entry in study.architectures}
    for name in only:
        if name not in names:
            raise ConfigError(f"study {study.name} has no architecture {name!r}: {nearest(name, names)}")
    return {*only, study.reference} if only else names


def validate(content: dict[str, Any], study: str) -> StudyConfig:
    """Return the study that `content`, read from `study`, describes; raises ConfigError for the first thing wrong."""
    try:
        return StudyConfig.model_validate(content)
    except ValidationError as error:
        problems = error.errors()
        unknown = ("extra_forbidden", "invalid_key")
        problem = next((one for one in problems if one["type"] in unknown), problems[0])
        where = ".".join(str(part) for part in problem["loc"] if part not in ("[key]", "[number]", "[list]"))
        if problem["type"] in unknown:
            raise ConfigError(f"study {study}: unknown key {where!r}: {_nearest_key(problem['loc'])}") from error
        if problem["type"] == "missing":
            raise ConfigError(f"study {study}: {where!r} is missing; add it.") from error
        given = f"study {study}: {where} = {_shown(problem['input'])}"
        raise ConfigError(f"{given}: {what_is_wrong(problem, StudyConfig, content)}") from error


def what_is_wrong(problem: ErrorDetails, section: type[BaseModel], content: dict[str, Any]) -> str:
    """Return the end of a sentence on a value of `content`, which is no `section`; a list is suggested where it works.

    Args:
        problem: what is wrong with the value.
        section: what `content` should be.
        content: the keys of the section.
    """
    if problem["type"] != "tuple_type":
        return f"{in_words(problem)}."
    place, value = problem["loc"], problem["input"]
    text = f"[{value if isinstance(value, str) else _shown(value)}]"
    try:
        section.model_validate(_changed(content, place, parse_yaml(text)))
        wrong = []
    except ValidationError as error:
        wrong = [one for one in error.errors() if one["loc"][: len(place)] == place]
    except ConfigError as error:
        return f"should be a list; {error}"
    except ValueError:  # not YAML
        return "should be a list."
    if not wrong:
        return f"should be a list, such as {text}."
    below, words = wrong[0]["loc"][len(place) :], in_words(wrong[0])
    if len(below) == 1 and wrong[0]["type"] == "missing":
        return f"should be a list with {1 + len(wrong)} entries."
    if len(below) == 1:
        return f"should be a list, each entry of which {words}."
    return f"should be a list, but not {text}: {' '.join(map(str, [*below[1:], words]))}."


def _changed(content: Any, place: Sequence[Any], value: Any) -> Any:
    """Return a copy of nested dicts and lists with another value at a place."""
    if not place:
        return value
    copy = content.copy()
    copy[place[0]] = _changed(content[place[0]], place[1:], value)
    return copy


def _shown(value: Any) -> str:
    """Return the beginning of a value as a study file would write it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value) if isinstance(value, datetime.date) else _BEGINNING.repr(value)


def _nearest_key(place: Sequence[Any]) -> str:
    """Return a hint for the unknown key at `place`: the section that has it, else the nearest that its own has."""
    *parents, last = place
    others = [name for name in ("train", "data", "model", "gap") if last in _keys([name])]
    return f"did you mean '{others[0]}.{last}'?" if others and len(parents) < 2 else nearest(str(last), _keys(parents))


def _keys(place: list[Any]) -> list[str]:
    """Return the valid keys of the section at `place`."""
    section: type[BaseModel] = StudyConfig
    sections: dict[Any, type[BaseModel]] = {
        "data": DataConfig,
        "model": SizeConfig,
        "train": TrainSection,
        "gap": GapConfig,
        "figure": FigureConfig,
        "published": PublishedConfig,
        "architectures": ArchitectureEntry,
        "layers": PatternEntry,
    }
    for part in place:
        section = SizeOverride if part == "model" and section is ArchitectureEntry else sections.get(part, section)
    read_only = READ_ONLY if section is StudyConfig else ()
    return [*(field.alias or name for name, field in section.model_fields.items()), *read_only]
