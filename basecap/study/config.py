"""The study file: read, completed, checked. Nothing runs and nothing is written here."""

import difflib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from basecap.data.config import Count, DataConfig, Number
from basecap.data.task_config import TaskSection
from basecap.data.tokenizer import BYTES
from basecap.errors import ConfigError, nearest
from basecap.names import PAPER, at_scale
from basecap.options import Problem, first_problem
from basecap.records import StudyRecords
from basecap.study.architectures import ArchitectureEntry, PatternEntry, Section, SizeConfig, SizeOverride, entry_keys
from basecap.study.published import FigureConfig, PublishedSection
from basecap.study.study_file import READ_ONLY, apply_setting, own_scales, read_study, refuse_untested_shifts
from basecap.study.value_errors import describe_value_error, shown
from basecap.tasks import Readout
from basecap.train.config import TrainSection

#: Kinds of problems that are keys which no section has.
UNKNOWN = ("extra_forbidden", "invalid_key")

#: Names of studies: they become directories.
NAME = re.compile(r"\w[\w .+,=-]{0,99}")

#: Batches are drawn by the hash of a seed of 64 bits.
Seed = Annotated[Count, Field(ge=0, lt=2**63)]

#: What a gap may cost and still keep the capability, the same in every study: a tenth of the reference's tokens. How
#: many nats that is follows from the reference's own training, so it means the same at every size.
COST = 0.1


class GapConfig(Section):
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


class StudyConfig(Section):
    """A complete study."""

    name: str = Field(description="what the report is called, and with --scale its directory below runs/")
    summary: str = Field("", description="one line for `basecap list studies`")
    scale: str | None = Field(
        None, description="name of the chosen scale, see --scale (default: paper, for a study with scales)"
    )
    data: DataConfig | None = Field(None, description="the text that runs train on; a study has this or task")
    task: TaskSection | None = Field(None, description="the tasks that runs train on instead of text")
    model: SizeConfig
    train: TrainSection
    seeds: tuple[Seed, ...] = Field((0,), min_length=1, description="one run per architecture and seed")
    reference_seeds: tuple[Seed, ...] | None = Field(
        None,
        min_length=1,
        description="seeds of the reference, to which all others are compared; as seeds when not given",
    )
    architectures: tuple[ArchitectureEntry, ...] = Field(
        min_length=1, description="the architectures to compare: names, or entries with the keys below"
    )
    any_architecture: bool = Field(
        False,
        description="whether --only and reference take any name of `basecap list mixers`, also one not listed here",
    )
    reference: str = Field("transformer++", description="the architecture the others are compared with")
    evals: tuple[str | dict[str, Any], ...] = Field(
        ("domain-loss", "copying"),
        min_length=1,
        description="names, see `basecap list evals`, or name: {option: value}; of tasks recall when not given",
    )
    gap: GapConfig = Field(default_factory=GapConfig)
    figure: FigureConfig | None = Field(None, description="the paper's figure that the report draws; changes no number")
    published: PublishedSection | None = Field(
        None, description="published numbers that the report shows beside the measured ones"
    )

    @model_validator(mode="before")
    @classmethod
    def _tasks_are_recalled(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("task") is not None and "evals" not in content:
            return {**content, "evals": ["recall"]}
        return content

    @field_validator("name")
    @classmethod
    def _name_is_a_directory(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(
                "a name begins with a letter or digit, contains only letters, digits, spaces and _ . + , = -, and has "
                "100 characters at most"
            )
        return value

    @property
    def directory(self) -> Path:
        """Default directory of the study."""
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
                wanted = "write NAME or NAME: {option: value}"
                raise ValueError(f"{shown(entry)} is not an evaluation; {wanted}")
        return value

    @field_validator("architectures", mode="before")
    @classmethod
    def _names_are_architectures(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [entry_keys(item) for item in value]
        return value

    @field_validator("architectures")
    @classmethod
    def _names_differ(cls, value: tuple[ArchitectureEntry, ...]) -> tuple[ArchitectureEntry, ...]:
        names = [entry.name for entry in value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two entries are called {name!r}; give one another name")
        return value

    @model_validator(mode="before")
    @classmethod
    def _trains_on_one_kind(cls, content: Any) -> Any:
        if isinstance(content, dict) and (content.get("data") is None) == (content.get("task") is None):
            wanted = "not both; remove one" if content.get("data") else "and this has neither; add one"
            raise ConfigError(f"a study has a section data (text) or task (tasks), {wanted}.")
        return content

    @model_validator(mode="after")
    def _options_fit_its_kind(self) -> "StudyConfig":
        if self.published is not None and self.task is None:
            raise ConfigError("published numbers can only be compared with accuracies on tasks; remove published.")
        if self.train.tokens is None and self.train.epochs is None:
            raise ConfigError(f"'train.tokens' is missing; add it{' or train.epochs' if self.task else ''}.")
        if self.train.tokens is not None and self.train.epochs is not None:
            raise ConfigError(
                "train.tokens and train.epochs both set the length of a run; remove one or set it to null."
            )
        return self

    @model_validator(mode="after")
    def _entries_train_on_tasks_of_the_study(self) -> "StudyConfig":
        for entry in self.architectures:
            for name in entry.tasks or ():
                if self.task is None:
                    raise ConfigError(f"architecture {entry.name!r}: tasks needs a study of tasks; remove it.")
                if name not in self.task.train:
                    hint = nearest(name, self.task.train)
                    raise ConfigError(f"architecture {entry.name!r}: task {name!r} is not in task.train: {hint}")
        return self

    @model_validator(mode="after")
    def _controls_are_compared(self) -> "StudyConfig":
        for entry in self.architectures:
            if entry.control and self.task is not None:
                raise ConfigError(f"architecture {entry.name!r}: control needs a study of text; remove it.")
            if entry.control and entry.name == self.reference:
                raise ConfigError(
                    f"architecture {entry.name!r} is the reference, which is compared with nothing; remove its control."
                )
        return self

    @model_validator(mode="after")
    def _vocabulary_fits(self) -> "StudyConfig":
        what, needed = "tasks'", self.task.vocabulary if self.task else 0
        if self.data is not None:
            what, needed = "tokenizer's", {"bytes": BYTES, "bpe": self.data.vocab}.get(self.data.tokenizer, 0)
        if self.model.vocab is not None and self.model.vocab < needed:
            raise ConfigError(f"model.vocab = {self.model.vocab} is less than the {what} {needed}; set at least that.")
        return self

    @property
    def text(self) -> DataConfig:
        """The text of the study; raises ConfigError where it trains on tasks."""
        if self.data is None:
            raise ConfigError(f"study {self.name} trains on tasks and has no text; choose a study that has.")
        return self.data

    @property
    def kind(self) -> Literal["text", "task"]:
        """What runs train on."""
        return "text" if self.task is None else "task"

    @property
    def vocabulary(self) -> int:
        """Number of token ids: of the tasks, of bytes, or of a tokenizer that is trained here."""
        if self.task is not None:
            return self.task.vocabulary
        return BYTES if self.text.tokenizer == "bytes" else self.text.vocab

    @property
    def readout(self) -> Readout:
        """Where models answer, see `Task.readout`."""
        return "each" if self.task is None else self.task.readout

    @property
    def length(self) -> int:
        """Tokens of the longest sequence that models are built for."""
        return self.text.seq_len if self.task is None else self.task.length

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """Return the seeds that the architecture `name` is trained with."""
        return self.reference_seeds if self.reference_seeds and name == self.reference else self.seeds


def load_study(study: str, settings: Sequence[str] = (), scale: str | None = None) -> StudyConfig:
    """Read a built-in study by name or a YAML file.

    Args:
        study: name in the library, or path of a file.
        settings: "a.b=value" overrides, the value in YAML; they come after those of the scale.
        scale: name of a scale; default: the key `scale` of the file, else the paper's.

    Raises:
        ConfigError: unknown study, scale, key or name, impossible value; with the place and the nearest valid name.
    """
    content = read_study(study, scale)
    for setting in settings:
        apply_setting(content, setting)
    for setting in settings:
        if setting.startswith("task.shifts"):
            layer: dict[str, Any] = {}
            apply_setting(layer, setting)
            refuse_untested_shifts(layer, content, f"--set {setting}")
    chosen = content.get("scale")
    where = study if chosen in (None, PAPER) else at_scale(study, chosen)
    try:
        config = validate(content, where)
    except ConfigError:
        if Path(study).name == "study.yaml":  # of a directory, whose records name its plugin files
            from basecap.study.recorded_plugins import refuse_absent_plugins  # imports torch

            refuse_absent_plugins(StudyRecords(Path(study).parent))
        raise
    _refuse_keys_at_other_scales(study, chosen)
    names = [entry.name for entry in config.architectures]
    if config.reference not in names and config.task is None:
        for entry in config.architectures:  # a misspelt name is reported as such, not as a missing reference
            _check_architecture(entry)
        if config.any_architecture:
            return with_named(config, [config.reference])
        other = (difflib.get_close_matches(config.reference, names, n=1) or names)[0]
        raise ConfigError(
            f"study {study}: the reference {config.reference!r} is not among the architectures; add it to them, or "
            f"compare with another: --set {shlex.quote(f'reference={other}')}."
        )
    return config


def _check_architecture(entry: ArchitectureEntry) -> None:
    from basecap.mixers import ARCHITECTURES  # imports torch, which a study alone does not need

    try:
        ARCHITECTURES.get(entry.use)
    except ConfigError as error:
        raise ConfigError(f"architecture {entry.name!r}: {error}") from error


def with_named(study: StudyConfig, only: Sequence[str]) -> StudyConfig:
    """Return the study with the names of `only` among its architectures where it takes any.

    Raises:
        ConfigError: a name that no architecture has.
    """
    known = {entry.name for entry in study.architectures}
    if not study.any_architecture or known.issuperset(only):
        return study
    from basecap.mixers import ARCHITECTURES  # imports torch, which a study alone does not need

    try:
        added = [
            ArchitectureEntry.model_validate(entry_keys(name)) for name in dict.fromkeys(only) if name not in known
        ]
    except ValidationError as error:
        hint = "give a name of `basecap list mixers`"
        raise ConfigError(f"--only {first_problem(error).given!r} is not an architecture; {hint}.") from error
    for entry in added:
        if entry.use not in ARCHITECTURES.names() and (hint := nearest(entry.name, known)).startswith("did"):
            raise ConfigError(f"study {study.name} has no architecture {entry.name!r}: {hint}")
        ARCHITECTURES.get(entry.use)
    return study.model_copy(update={"architectures": (*study.architectures, *added)})


def select(study: StudyConfig, only: Sequence[str], hint_at_set: bool = False) -> set[str]:
    """Return the names of the architectures to run: those in `only` and the reference; all when `only` is empty."""
    names = {entry.name for entry in study.architectures}
    for name in only:
        if name not in names:
            hint = nearest(name, names)
            if hint_at_set and not hint.startswith("did"):
                hint += " To compare others, add --set any_architecture=true, or list them under architectures."
            raise ConfigError(f"study {study.name} has no architecture {name!r}: {hint}")
    return {*only, study.reference} & names if only else names


def restrict(study: StudyConfig, names: set[str]) -> StudyConfig:
    """Return the study with the architectures `names` only."""
    kept = tuple(entry for entry in study.architectures if entry.name in names)
    return study.model_copy(update={"architectures": kept})


def validate(content: dict[str, Any], study: str) -> StudyConfig:
    """Return the study that `content`, read from `study`, describes; raises ConfigError for the first thing wrong."""
    try:
        return StudyConfig.model_validate(content)
    except ConfigError as error:
        raise ConfigError(f"study {study}: {error}") from error
    except ValidationError as error:
        problem = first_problem(error, before=UNKNOWN)
        if problem.kind in UNKNOWN:
            raise ConfigError(f"study {study}: {_unknown_key(problem)}") from error
        if problem.kind == "missing":
            raise ConfigError(f"study {study}: {problem.where!r} is missing; add it.") from error
        given = f"study {study}: {problem.where} = {shown(problem.given)}"
        raise ConfigError(f"{given}: {describe_value_error(problem, StudyConfig, content)}") from error


def _refuse_keys_at_other_scales(study: str, chosen: str | None) -> None:
    """Raise ConfigError for an unknown key that a study file sets at a scale other than the chosen one.

    Values are not checked: those of --set may be meant for the chosen scale only.
    """
    for scale in [name for name in own_scales(study) if name != chosen]:
        try:
            StudyConfig.model_validate(read_study(study, scale))
        except ConfigError:
            continue
        except ValidationError as error:
            if (problem := first_problem(error, before=UNKNOWN)).kind in UNKNOWN:
                raise ConfigError(f"study {at_scale(study, scale)}: {_unknown_key(problem)}") from error


def _unknown_key(problem: Problem) -> str:
    return f"unknown key {problem.where!r}: {_nearest_key(problem.place)}"


def _nearest_key(place: Sequence[Any]) -> str:
    """Return a hint for the unknown key at `place`: the section that has it, else the nearest that its own has."""
    *parents, last = place
    others = [f"{name}.{last}" for name in ("train", "data", "task", "model", "gap") if last in _keys([name])]
    others += [last] if last in _keys([]) else []
    if others and len(parents) < 2:
        return f"did you mean {others[0]!r}?"
    return nearest(str(last), _keys(parents), within="".join(f"{part}." for part in parents))


def _keys(place: list[Any]) -> list[str]:
    """Return the valid keys of the section at `place`."""
    section: type[BaseModel] = StudyConfig
    sections: dict[Any, type[BaseModel]] = {
        "data": DataConfig,
        "task": TaskSection,
        "published": PublishedSection,
        "model": SizeConfig,
        "train": TrainSection,
        "gap": GapConfig,
        "figure": FigureConfig,
        "architectures": ArchitectureEntry,
        "layers": PatternEntry,
    }
    for part in place:
        section = SizeOverride if part == "model" and section is ArchitectureEntry else sections.get(part, section)
    read_only = READ_ONLY if section is StudyConfig else ()
    return [*(field.alias or name for name, field in section.model_fields.items()), *read_only]
