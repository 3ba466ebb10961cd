"""From a study to its runs: what each one trains, and what it will cost. Pure: touches no file, builds no weights."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import ValidationError

from basecap.errors import ConfigError, nearest
from basecap.evals import At, Evaluation, build_evaluation
from basecap.models.config import LayerConfig, ModelConfig, model_config
from basecap.models.language_model import LanguageModel
from basecap.study.config import ArchitectureEntry, StudyConfig, what_is_wrong
from basecap.train.checkpoint import KEPT
from basecap.train.config import Timetable, TrainConfig

#: Training options that the hash of a run always counts. Any other counts where it differs from its default: an option
#: that is added later leaves the hashes of recorded runs as they are.
ALWAYS_COUNTED = (
    "tokens",
    "batch",
    "micro_batch",
    "lr",
    "final_lr",
    "warmup",
    "schedule",
    "betas",
    "weight_decay",
    "clip",
    "precision",
    "eval_every",
    "checkpoint_every",
    "checkpointing",
    "compile",
)

#: Training options that change no number, and that the hash of a run never counts.
NEVER_COUNTED = ("keep",)

#: Training options that an architecture cannot have for itself, as they would be a difference of their own.
SHARED = ("eps",)


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One run: one architecture, one seed; in a sweep also one learning rate."""

    name: str
    use: str
    seed: int
    model: ModelConfig
    train: TrainConfig
    sweep: bool = False

    @property
    def rate(self) -> float | None:
        """The learning rate that a run of a sweep tries, None for any other run."""
        return self.train.lr if self.sweep else None

    @property
    def label(self) -> str:
        """How the run is called on the terminal."""
        return f"{self.name} (lr {self.rate:g}, seed {self.seed})" if self.sweep else f"{self.name} (seed {self.seed})"

    @property
    def hash(self) -> str:
        """Sixteen hex digits that change with anything the run depends on, its data apart."""
        options = self.train.model_dump(mode="json")
        changed = self.train.model_dump(mode="json", exclude_defaults=True)
        train = {key: options[key] for key in options if key in ALWAYS_COUNTED or key in changed}
        train = {key: value for key, value in train.items() if key not in NEVER_COUNTED}
        train["seeds"] = [self.seed]  # where the seed stood when there were only `train.seeds`
        content = [self.name, self.seed, self.model.model_dump(mode="json"), train]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a run is predicted to take.

    Attributes:
        parameters: of the model, a tied head counted once.
        blocks: number of blocks.
        tokens: training tokens.
        flops: floating-point operations of training (forward + backward = 3 x forward).
        memory: bytes of weights, gradients and Adam's moments in fp32, activations apart.
        state: bytes of decoding state per sequence at the training length, in fp32.
        evaluations: how often the model is evaluated.
        checkpoints: bytes of the checkpoints that a run resumes from.
        weights: bytes of the weights that `train.keep` leaves.
    """

    parameters: int
    blocks: int
    tokens: int
    flops: float
    memory: int
    state: int
    evaluations: int
    checkpoints: int
    weights: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one command does in the directory of a study, computed once the data is there.

    Attributes:
        study: as the directory holds it: the study of this command with what earlier ones had.
        runs: what is to be finished, as far as it is known.
        evaluations: what models are measured by.
    """

    study: StudyConfig
    runs: tuple[RunSpec, ...]
    evaluations: tuple[Evaluation, ...]

    @property
    def swept(self) -> list[RunSpec]:
        """The runs of sweeps that have not chosen a learning rate."""
        return [run for run in self.runs if run.sweep]

    @property
    def trained(self) -> list[RunSpec]:
        """The runs of the study itself, whose learning rate is known."""
        return [run for run in self.runs if not run.sweep]


def plan_runs(study: StudyConfig, vocab: int, chosen: Mapping[str, float] | None = None) -> list[RunSpec]:
    """Return the runs of a study, seed by seed; raises ConfigError for unknown names and impossible sizes.

    Where `train.lr` is a sweep, an architecture has the runs of its sweep, each rate with the first seed, until its
    rate is chosen, and from then on one run per seed.

    Args:
        study: the study.
        vocab: the tokeniser's vocabulary, used unless the study sets its own.
        chosen: the rates that sweeps have chosen, by architecture.
    """
    models = {entry.name: _model(study, entry, vocab) for entry in study.architectures}
    runs = []
    for seed in dict.fromkeys((*study.seeds, *(study.reference_seeds or ()))):
        for entry in study.architectures:
            sweep = bool(study.train.sweep) and entry.name not in (chosen or {})
            seeds = study.seeds_of(entry.name)
            if seed in (seeds[:1] if sweep else seeds):
                for rate in study.train.sweep if sweep else [(chosen or {}).get(entry.name)]:
                    train, model = plan_training(study, entry, rate), models[entry.name]
                    run = RunSpec(name=entry.name, use=entry.use, seed=seed, model=model, train=train, sweep=sweep)
                    runs.append(run)
    return runs


def plan_evaluations(study: StudyConfig) -> list[Evaluation]:
    """Return the study's evaluations; raises ConfigError for unknown names and options, and for one named twice."""
    evaluations = [build_evaluation(entry) for entry in study.evals]
    names = [evaluation.declaration.name for evaluation in evaluations]
    for name in names:
        if names.count(name) > 1:  # records know an evaluation by its name: the second would replace the first
            raise ConfigError(f"evals: {name!r} is named twice; remove one, or run it in a study of its own.")
    return evaluations


def cost(run: RunSpec) -> Cost:
    """Predict what a run takes; raises ConfigError, naming the architecture, when its model cannot be built."""
    try:
        with torch.device("meta"):
            model = LanguageModel(run.model)
    except ConfigError as error:
        raise ConfigError(f"architecture {run.name!r}: {error}") from error
    length = run.model.max_length
    timetable = Timetable(run.train, length)
    tokens = timetable.steps * timetable.step_tokens
    parameters = model.parameters_count()
    return Cost(
        parameters=parameters,
        blocks=run.model.depth,
        tokens=tokens,
        flops=model.training_flops(length) / length * tokens,
        memory=16 * parameters,
        state=model.state_bytes(length),
        evaluations=timetable.evaluations,
        checkpoints=KEPT * (12 if run.train.average is None else 16) * parameters,
        weights=4 * parameters * timetable.kept,
    )


def check_points(run: RunSpec, at: At, what: str) -> None:
    """Raise ConfigError, beginning with `what`, when `at` names tokens after which `run` is not evaluated."""
    if isinstance(at, str):
        return
    timetable = Timetable(run.train, run.model.max_length)
    points = [step * timetable.step_tokens for step in timetable.points]
    for tokens in at:
        if tokens not in points:
            near = min(points, key=lambda point: abs(point - tokens))
            raise ConfigError(
                f"{what}: {run.label} has no evaluation point after {tokens} tokens; the nearest is after {near}."
            )


def plan_training(study: StudyConfig, entry: ArchitectureEntry, rate: float | None = None) -> TrainConfig:
    """Return how an architecture of a study trains; raises ConfigError, naming it.

    Args:
        study: the study.
        entry: the architecture.
        rate: the learning rate in a study that sweeps it; the first of the sweep when not given.
    """
    for key in entry.train:
        if key not in TrainConfig.model_fields:
            hint = nearest(key, TrainConfig.model_fields)
            raise ConfigError(f"architecture {entry.name!r}: unknown key train.{key}: {hint}")
        if key in SHARED:
            raise ConfigError(
                f"architecture {entry.name!r}: train.{key} is the same for all architectures; set it for the study."
            )
    lr = entry.train.get("lr")
    if isinstance(lr, list | tuple) or (lr is not None and study.train.sweep):
        raise ConfigError(
            f"architecture {entry.name!r}: a sweep of train.lr is the same for all architectures; set it for the study."
        )
    content = {**study.train.model_dump(), **entry.train}
    if study.train.sweep:
        content["lr"] = rate or study.train.sweep[0]
    try:
        return TrainConfig.model_validate(content)
    except ConfigError as error:
        raise ConfigError(f"architecture {entry.name!r}: {error}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        wrong = what_is_wrong(problem, TrainConfig, content)
        raise ConfigError(f"architecture {entry.name!r}: train.{where}: {wrong}") from error


def _model(study: StudyConfig, entry: ArchitectureEntry, vocab: int) -> ModelConfig:
    size = study.model
    pattern: tuple[LayerConfig, ...] = (LayerConfig(use=entry.use, mixer=entry.mixer),)
    if entry.layers is not None:
        pattern = tuple(LayerConfig(use=item.use, mixer={**entry.mixer, **item.mixer}) for item in entry.layers)
    try:
        return model_config(
            entry.use,
            hidden=entry.model.hidden or size.hidden,
            vocab=size.vocab or vocab,
            layers=entry.model.layers or size.layers,
            pattern=pattern,
            backbone=entry.backbone,
            tied=size.tied if entry.model.tied is None else entry.model.tied,
            max_length=study.data.seq_len,
        )
    except ConfigError as error:
        raise ConfigError(f"architecture {entry.name!r}: {error}") from error
