"""From a study to its runs: what each one trains, and what it will cost. Pure: touches no file, builds no weights."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from basecap.data.task_data import TaskData
from basecap.errors import ConfigError, nearest
from basecap.evals import Evaluation, build_evaluation
from basecap.mixers import ARCHITECTURES, Architecture, refuse_other_recipes
from basecap.models import BACKBONES
from basecap.models.config import LayerConfig, ModelConfig, model_config
from basecap.models.language_model import LanguageModel
from basecap.models.outline import outline
from basecap.options import first_problem
from basecap.records.evaluation_points import At, nearest_point
from basecap.study.architectures import ArchitectureEntry
from basecap.study.config import StudyConfig
from basecap.study.value_errors import describe_value_error
from basecap.train.checkpoint import KEPT
from basecap.train.config import CHANGES_NO_NUMBER, Timetable, TrainConfig
from basecap.train.optim import moments_count

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

#: What evaluations measure on and studies train on.
WORDS = {"text": "text", "task": "tasks"}

#: Training options that an architecture cannot have for itself, as they would be a difference of their own.
SHARED = ("eps",)


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One run: one architecture, one seed; in a study of tasks also one training task, in a sweep one learning rate.

    Attributes:
        name: of its directory and in tables: the architecture's, with its task where a study trains on several.
        architecture: name of its entry in the study.
        use: the registered architecture.
        seed: of the weights, and of the order of text.
        model: what is built.
        train: how it trains.
        lengths: share of the steps by length of their sequences.
        sweep: whether it tries a learning rate.
        task: training task, None for text.
        examples: what the examples of the task and their order depend on, None for text.
    """

    name: str
    architecture: str
    use: str
    seed: int
    model: ModelConfig
    train: TrainConfig
    lengths: Mapping[int, float]
    sweep: bool
    task: str | None
    examples: str | None

    @property
    def length(self) -> int:
        """Tokens of the longest training sequence."""
        return max(self.lengths)

    @property
    def timetable(self) -> Timetable:
        """The run in steps."""
        return Timetable(self.train, self.length)

    def passes(self, pass_tokens: int) -> float:
        """Return how often the run reads its training text of `pass_tokens` tokens, on average over domains."""
        return self.timetable.end * self.timetable.step_tokens / pass_tokens

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
        """Sixteen hex digits that change with anything that the run depends on, except its text."""
        options = self.train.model_dump(mode="json")
        changed = self.train.model_dump(mode="json", exclude_defaults=True)
        train = {key: options[key] for key in options if key in ALWAYS_COUNTED or key in changed}
        train = {key: value for key, value in train.items() if key not in CHANGES_NO_NUMBER}
        train["seeds"] = [self.seed]  # where the seed was when there were only `train.seeds`
        content: list[Any] = [self.name, self.seed, self.model.model_dump(mode="json"), train]
        if self.examples is not None:
            content.append(self.examples)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a run is predicted to take.

    Attributes:
        parameters: of the model, a tied head counted once.
        blocks: number of blocks.
        steps: training steps, with those of branches.
        tokens: training tokens, with those of branches.
        flops: floating-point operations of training (forward + backward = 3 x forward).
        memory: bytes of weights, gradients and the optimiser's moments in fp32, without activations.
        state: bytes of decoding state per sequence at the training length, in fp32.
        evaluations: how often the model is evaluated.
        resume: bytes of the checkpoints that a run resumes from.
        weights: bytes of the weights that `train.keep` leaves.
    """

    parameters: int
    blocks: int
    steps: int
    tokens: int
    flops: float
    memory: int
    state: int
    evaluations: int
    resume: int
    weights: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a study trains and measures.

    Attributes:
        study: the study; in a directory that of this command with what earlier ones had.
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


def plan_study(study: StudyConfig, vocab: int, chosen: Mapping[str, float] | None = None) -> Plan:
    """Return the plan of a study; see `plan_runs` and `plan_evaluations` for arguments and errors."""
    runs, evaluations = plan_runs(study, vocab, chosen), plan_evaluations(study)
    return Plan(study=study, runs=tuple(runs), evaluations=tuple(evaluations))


def plan_runs(study: StudyConfig, vocab: int, chosen: Mapping[str, float] | None = None) -> list[RunSpec]:
    """Return the runs of a study, seed by seed; raises ConfigError for unknown names and impossible sizes.

    Where `train.lr` is a sweep, an architecture has the runs of its sweep, each rate with the first seed, until its
    rate is chosen, and from then on one run per seed.

    Args:
        study: the study.
        vocab: the vocabulary of text or tasks, used unless the study sets its own.
        chosen: the rates that sweeps have chosen, by name of the run.
    """
    models = {entry.name: model_of(study, entry, vocab) for entry in study.architectures}
    workloads = [TaskData(study.task, name) for name in study.task.train] if study.task else [None]
    pairs = [
        (entry, workload)
        for entry, workload in itertools.product(study.architectures, workloads)
        if workload is None or entry.tasks is None or workload.task in entry.tasks
    ]
    for entry, workload in pairs:
        _refuse_untrained_positions(entry.name, models[entry.name], workload)
    runs = []
    for seed in dict.fromkeys((*study.seeds, *(study.reference_seeds or ()))):
        for entry, workload in pairs:
            name = entry.name if workload is None or len(workloads) == 1 else f"{entry.name} on {workload.task}"
            sweep = bool(study.train.sweep) and name not in (chosen or {})
            seeds = study.seeds_of(entry.name)
            if seed in (seeds[:1] if sweep else seeds):
                for rate in study.train.sweep if sweep else [(chosen or {}).get(name)]:
                    run = RunSpec(
                        name=name,
                        architecture=entry.name,
                        use=entry.use,
                        seed=seed,
                        model=models[entry.name],
                        train=plan_training(study, entry, rate, workload),
                        lengths=workload.shares if workload else {study.length: 1.0},
                        sweep=sweep,
                        task=workload.task if workload else None,
                        examples=workload.manifest_hash if workload else None,
                    )
                    runs.append(run)
    return runs


def _refuse_untrained_positions(name: str, model: ModelConfig, workload: TaskData | None) -> None:
    """Raise ConfigError when positions with parameters of their own are tested that no training example reaches."""
    if workload is None or workload.longest_test <= workload.length:
        return
    mixers = [choice.mixer for layer in model.layers for choice in ARCHITECTURES.get(layer.use).layers]
    if BACKBONES.get(model.backbone).positions == "learned" or not all(mixer.takes_longer for mixer in mixers):
        raise ConfigError(
            f"architecture {name!r} has parameters for each position, and {workload.task!r} trains only those of "
            f"{workload.length}; leave out tests of {workload.longest_test} tokens, or that architecture."
        )


def plan_evaluations(study: StudyConfig) -> list[Evaluation]:
    """Return the study's evaluations.

    Raises:
        ConfigError: unknown names and options, one named twice, one of text in a study of tasks or the other way round.
    """
    evaluations = [build_evaluation(entry) for entry in study.evals]
    for evaluation in evaluations:
        if evaluation.needs not in (None, study.kind):
            raise ConfigError(
                f"evals: {evaluation.declaration.name!r} measures on {WORDS[evaluation.needs]}, and this study trains "
                f"on {WORDS[study.kind]}; remove it."
            )
    names = [evaluation.declaration.name for evaluation in evaluations]
    for name in names:
        if names.count(name) > 1:  # records know an evaluation by its name: the second would replace the first
            raise ConfigError(f"evals: {name!r} is named twice; remove one, or give it another name (its option name).")
    return evaluations


def costs(runs: Sequence[RunSpec]) -> list[Cost]:
    """Predict what each run takes; raises ConfigError, naming the architecture, when its model cannot be built."""
    models: dict[str, tuple[LanguageModel, int]] = {}
    for run in runs:
        if run.architecture not in models:
            try:
                model = outline(run.model)
                refuse_other_recipes(model, model.recipe())
                models[run.architecture] = model, moments_count(model, run.train)
            except ConfigError as error:
                raise ConfigError(f"architecture {run.architecture!r}: {error}") from error
    return [_cost(run, *models[run.architecture]) for run in runs]


def _cost(run: RunSpec, model: LanguageModel, moments: int) -> Cost:
    timetable = run.timetable
    sequences = timetable.trained_steps * run.train.batch
    flops = sum(share * (run.length // length) * model.training_flops(length) for length, share in run.lengths.items())
    parameters = model.parameters_count()
    return Cost(
        parameters=parameters,
        blocks=run.model.depth,
        steps=timetable.trained_steps,
        tokens=timetable.trained_steps * timetable.step_tokens,
        flops=flops * sequences,
        memory=4 * (2 * parameters + moments),
        state=model.state_bytes(run.length),
        evaluations=timetable.evaluations,
        resume=KEPT * 4 * ((1 if run.train.average is None else 2) * parameters + moments),
        weights=4 * parameters * timetable.kept,
    )


def moved_points(runs: Sequence[RunSpec], at: At, what: str) -> list[str]:
    """Return a sentence, beginning with `what`, for each number of tokens of `at` that is no evaluation point."""
    sentences = []
    for points in dict.fromkeys(tuple(run.timetable.tokens) for run in runs if not isinstance(at, str)):
        for tokens in at:
            nearest = nearest_point(int(tokens), points)
            if nearest != tokens:
                sentences.append(f"{what}: {tokens} tokens are no evaluation point; the nearest is after {nearest}.")
    return sentences


def plan_training(
    study: StudyConfig, entry: ArchitectureEntry, rate: float | None = None, workload: TaskData | None = None
) -> TrainConfig:
    """Return how an architecture of a study trains; raises ConfigError, naming it.

    Args:
        study: the study.
        entry: the architecture.
        rate: the learning rate in a study that sweeps it; the first of the sweep when not given.
        workload: of a task, whose epochs are counted in tokens; None for text.
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
    if "tokens" in entry.train:
        content["epochs"] = None
    if content["epochs"] is not None:
        content["tokens"] = 1  # until the options are checked
    try:
        config = TrainConfig.model_validate(content)
        if workload is None:
            for option in ("epochs", "stop_at"):
                if getattr(config, option) is not None:
                    raise ConfigError(f"train.{option} needs the examples of a task, not text; remove it.")
        if config.epochs is None or workload is None:
            return config
        tokens = workload.tokens(config.epochs, config.batch)
        return config.model_copy(update={"tokens": tokens, "epochs": None})
    except ConfigError as error:
        raise ConfigError(f"architecture {entry.name!r}: {error}") from error
    except ValidationError as error:
        problem = first_problem(error)
        wrong = describe_value_error(problem, TrainConfig, content)
        raise ConfigError(f"architecture {entry.name!r}: train.{problem.where}: {wrong}") from error


def model_of(study: StudyConfig, entry: ArchitectureEntry, vocab: int) -> ModelConfig:
    """Return the model of one architecture of a study, with `vocab` entries unless the study sets them; ConfigError."""
    size = study.model
    layers = [(entry.use, entry.mixer)]
    try:
        if entry.layers is not None:
            _refuse_lost(entry, [ARCHITECTURES.get(item.use) for item in entry.layers])
            layers = [(item.use, {**entry.mixer, **item.mixer}) for item in entry.layers]
        pattern = tuple(LayerConfig(use=use, mixer=_with_heads(use, mixer, size.heads)) for use, mixer in layers)
        config = model_config(
            entry.use,
            hidden=entry.model.hidden or size.hidden,
            vocab=size.vocab or vocab,
            layers=entry.model.layers or size.layers,
            pattern=pattern,
            backbone=entry.backbone,
            tied=size.tied if entry.model.tied is None else entry.model.tied,
            max_length=study.length,
        )
        return config.model_copy(update={"readout": study.readout, "canon": entry.canon})
    except ConfigError as error:
        raise ConfigError(f"architecture {entry.name!r}: {error}") from error


def _refuse_lost(entry: ArchitectureEntry, layers: Sequence[Architecture]) -> None:
    """Raise ConfigError where an entry uses an architecture for what the layers in its place do not have."""
    used = ARCHITECTURES.get(entry.use)
    lost = {
        "Canon layers": bool(used.canon) and entry.canon is None and not any(layer.canon for layer in layers),
        "n-grams": bool(used.ngram) and not any(layer.ngram for layer in layers),
    }
    if what := " and ".join(name for name, is_lost in lost.items() if is_lost):
        raise ConfigError(
            f"layers replace all layers of {entry.use!r}, which alone have its {what}; list one of them, or use "
            f"{used.variant_of!r} for the backbone."
        )


def _with_heads(use: str, mixer: dict[str, Any], heads: int | None) -> dict[str, Any]:
    """Return the options of an architecture's mixers with the study's number of heads, where they leave it open."""
    choices = ARCHITECTURES.get(use).layers
    is_open = any("heads" in choice.mixer.Config.model_fields and "heads" not in choice.options for choice in choices)
    return {"heads": heads, **mixer} if heads is not None and is_open else mixer
