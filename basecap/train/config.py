"""The section `train` of a study, and the steps at which a run evaluates and saves."""

import math
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from basecap.data.config import Count, Number
from basecap.data.workload import share_of
from basecap.errors import ConfigError
from basecap.train.schedule import learning_rate, warmup_steps

Beta = Annotated[Number, Field(ge=0, lt=1)]
PositiveNumber = Annotated[Number, Field(gt=0)]


#: A learning rate or a list of them, distinguished before validation so that each has clear error messages.
Rates = Annotated[
    Annotated[PositiveNumber, Tag("[number]")] | Annotated[tuple[PositiveNumber, ...], Tag("[list]")],
    Discriminator(lambda value: "[list]" if isinstance(value, list | tuple) else "[number]"),
]


def _keep(value: Any) -> Any:
    if value in ("last", "all") or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError("should be last, all or a number of evaluation points, such as 5")


Keep = Annotated[Literal["last", "all"] | int, BeforeValidator(_keep)]


def _recomputed(value: Any) -> Any:
    if value in (True, False, "full", "selective"):
        return True if value == "full" else value
    raise ValueError("should be true, false or selective")


Recomputed = Annotated[bool | Literal["selective"], BeforeValidator(_recomputed)]


def _graphs(value: Any) -> Any:
    if value in (True, False, "auto"):
        return value
    raise ValueError("should be auto, true or false")


Graphs = Annotated[bool | Literal["auto"], BeforeValidator(_graphs)]


class TrainSection(BaseModel):
    """How runs train. Defaults follow arXiv 2505.18522, appendix A; those it does not give are marked *our choice*."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tokens: Count | None = Field(
        None, ge=1, description="training tokens, rounded up to whole batches; required unless epochs is given"
    )
    epochs: Count | None = Field(
        None, ge=1, le=2**30, description="for tasks: passes over the training examples, instead of tokens"
    )
    batch: Count = Field(256, ge=1, le=2**20, description="sequences per optimiser step, over all devices")
    micro_batch: Count | None = Field(
        None,
        ge=1,
        description="sequences per forward pass and device (default: all sequences of the device)",
    )
    lr: Rates = Field(
        2e-4,
        description="peak learning rate; a list is a sweep: every rate with the first seed, then for each architecture "
        "the rate with the lowest held-out loss on the training domains",
    )
    final_lr: Number = Field(0.0, ge=0, le=1, description="learning rate at the end, as a share of the peak")
    warmup: Count = Field(2500, ge=0, description="steps of linear warm-up; at most a tenth of the run")
    schedule: Literal["linear", "cosine", "constant", "wsd"] = Field(
        "linear",
        description="decay after the warm-up: linear, cosine, constant (no decay), or wsd: constant, with a copy that "
        "decays to the end of each budget of branches and of the run",
    )
    decay: Number = Field(0.2, gt=0, le=0.9, description="for wsd: share of a budget over which the rate decays")
    branches: tuple[Count, ...] = Field(
        (), description="for wsd: budgets in tokens at which a decayed copy is evaluated, besides train.tokens"
    )
    optimiser: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw, or muon (arXiv 2502.16982): Muon for the matrices of the blocks, with updates as large as "
        "AdamW's, and AdamW for the rest; needs torch 2.9 or newer",
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay rates of Adam's moments")
    eps: Number = Field(1e-8, gt=0, description="Adam's epsilon, the same for all architectures")
    weight_decay: Number = Field(0.1, ge=0, description="decoupled weight decay, on matrices (our choice)")
    embedding_weight_decay: Number | None = Field(None, ge=0, description="of embeddings (default: weight_decay)")
    other_weight_decay: Number = Field(0.0, ge=0, description="of gains, biases and what else recipes leave without")
    clip: Number = Field(1.0, gt=0, description="maximum gradient norm (our choice), or value, see clip_by")
    clip_by: Literal["norm", "value"] = Field(
        "norm", description="whether clip limits the norm of all gradients together, or the value of each"
    )
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="precision of matrix products, auto: bf16 on a GPU, else fp32; weights are fp32"
    )
    eval_every: Count | None = Field(
        None, ge=1, description="tokens between evaluations (default: a twentieth of the run)"
    )
    checkpoint_every: Count | None = Field(
        None,
        ge=1,
        description="tokens between checkpoints (default: before every evaluation and every ten minutes)",
    )
    keep: Keep = Field(
        "last",
        description="evaluation points whose weights are kept in DIR/runs/RUN/weights for `basecap eval`: last, all, "
        "or a number N for every N-th and the last",
    )
    average: Number | None = Field(
        None,
        gt=0,
        le=0.25,
        description="width of a running average of the weights to evaluate (arXiv 2312.02696), as a share of the steps "
        "so far, such as 0.05 (default: no average)",
    )
    stop_at: Number | None = Field(
        None,
        gt=0,
        le=1,
        description="for tasks: end a run at the first evaluation point with at least this validation accuracy, the "
        "mean over cells, such as 0.99",
    )
    checkpointing: Recomputed = Field(
        False,
        description="recompute activations in the backward pass: true (all but the choices of chunks) or selective "
        "(all but those and the results of matrix products and attention, as compiled code does anyway)",
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="under torchrun: a copy of the model in each process (ddp), or a part of each weight (fsdp), for "
        "models that are too large for one GPU",
    )
    shard: Count | None = Field(
        None,
        ge=1,
        description="for fsdp: processes that hold one copy of the model between them; a divisor of their number "
        "(default: all), such as the GPUs of a host",
    )
    compile: bool | None = Field(None, description="use torch.compile (default: on a GPU only)")
    deterministic: bool = Field(
        False,
        description="train with operations that give the same bits twice on the same machine; an architecture that "
        "needs one without such a form is refused",
    )
    cuda_graphs: Graphs = Field(
        "auto",
        description="on one GPU, replay training steps as CUDA graphs: the same numbers, several times as fast where "
        "steps are too small to keep the GPU busy; auto: where a step can be captured and leaves half of the free "
        "memory, true: or refuse the run",
    )

    @field_validator("lr")
    @classmethod
    def _sweep_has_values(cls, value: float | tuple[float, ...]) -> float | tuple[float, ...]:
        if not isinstance(value, tuple):
            return value
        if not value:
            raise ValueError("is an empty list; give one learning rate or several")
        if len(set(value)) < len(value):
            raise ValueError("a rate is named twice; remove one")
        return value if len(value) > 1 else value[0]

    @model_validator(mode="after")
    def _branches_fit(self) -> "TrainSection":
        if self.schedule != "wsd":
            for name in ("branches", "decay"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ConfigError(f"train.{name} needs train.schedule = wsd; set that, or remove train.{name}.")
        elif isinstance(self.lr, tuple):
            raise ConfigError("a sweep of train.lr needs a schedule without branches; replace wsd, or give one rate.")
        elif self.epochs is not None or self.stop_at is not None:
            raise ConfigError("train.schedule = wsd has budgets in tokens; remove train.epochs and train.stop_at.")
        elif self.branches and min(self.branches) < 1:
            raise ConfigError("train.branches has a budget below 1 token; remove it.")
        elif self.tokens is not None and self.branches and max(self.branches) > self.tokens:
            raise ConfigError(
                f"train.branches has {max(self.branches)}, more than train.tokens = {self.tokens}; lower it, or raise "
                "train.tokens."
            )
        return self

    @model_validator(mode="after")
    def _shards_are_asked_for(self) -> "TrainSection":
        if self.shard is not None and self.parallel != "fsdp":
            raise ConfigError("train.shard needs train.parallel = fsdp; set that, or remove train.shard.")
        return self

    @model_validator(mode="after")
    def _muon_has_whole_matrices(self) -> "TrainSection":
        if self.optimiser == "muon" and self.parallel == "fsdp":
            raise ConfigError(
                "train.optimiser = muon needs whole matrices in each process; use train.parallel = ddp, or adamw."
            )
        return self

    @model_validator(mode="after")
    def _batches_divide(self) -> "TrainSection":
        self.forward_batch(1)
        return self

    def forward_batch(self, world: int) -> int:
        """Return the sequences of a forward pass in each of `world` processes.

        Raises ConfigError if `batch` is not divisible by `world`, or a process's share by `micro_batch`.
        """
        share = share_of(self.batch, world)
        size = self.micro_batch or share
        if share % size:
            raise ConfigError(
                f"train.micro_batch = {size} is not a divisor of the {share} sequences of each process; choose one."
            )
        return size

    def mesh(self, world: int) -> tuple[int, int]:
        """Return (copies of the model, processes that hold one between them) of `world` processes.

        Raises ConfigError if `shard` is no divisor of `world`.
        """
        if self.parallel == "ddp":
            return world, 1
        shard = self.shard or world
        if world > 1 and world % shard:
            raise ConfigError(f"train.shard = {shard} is not a divisor of the {world} processes; choose one.")
        return (1, 1) if world == 1 else (world // shard, shard)

    @property
    def continues(self) -> bool:
        """Whether a run can be continued to more tokens, as its learning rates do not depend on their number."""
        return self.schedule in ("constant", "wsd")

    @property
    def sweep(self) -> tuple[float, ...]:
        """The learning rates of a sweep, empty without a sweep."""
        return self.lr if isinstance(self.lr, tuple) else ()


#: Options that change no number: they may differ between the runs of a study, whose hashes do not count them.
CHANGES_NO_NUMBER = ("keep", "cuda_graphs", "parallel", "shard")


class TrainConfig(TrainSection):
    """How one run trains: with one learning rate, for a number of tokens."""

    tokens: Count = Field(ge=1, description="training tokens, rounded up to whole batches")
    lr: Number = Field(2e-4, gt=0, description="peak learning rate")


#: Number of evenly spaced evaluation points of a run without `eval_every`: half of them are enough for a curve.
EVALUATIONS = 20


class Timetable:
    """The steps of a run, and those after which it evaluates, saves and keeps weights.

    With schedule wsd it is that of the trunk, which trains at the constant rate as far as the last branch needs.

    Attributes:
        step_tokens: tokens of a step.
        end: number of steps of the budget `train.tokens`.
        steps: number of steps, as many as `end` except in a trunk.
        warmup: steps of warm-up.
        branches: of the trunk, in the order of their budgets; the last one ends at `end`. Empty for other schedules.
    """

    def __init__(self, config: TrainConfig, length: int):
        """Take the options and the tokens of the longest training sequence."""
        self.step_tokens = config.batch * length
        self.end = -(-config.tokens // self.step_tokens)
        budgets = {-(-tokens // self.step_tokens) for tokens in config.branches} | {self.end}
        # The first budget: a run that is continued to more tokens keeps its warm-up.
        self.warmup = warmup_steps(config.warmup, min(budgets))
        self.config = config
        self.branches = [Branch(self, end) for end in sorted(budgets)] if config.schedule == "wsd" else []
        self.steps = self.branches[-1].start if self.branches else self.end
        self._keep = config.keep
        self._evaluation = self._interval(config.eval_every)
        self._checkpoint = self._interval(config.checkpoint_every or config.eval_every)

    def rate(self, step: int) -> float:
        """Return the learning rate of update `step`, from 0."""
        config = self.config
        return learning_rate(
            step, self.end, peak=config.lr, final=config.final_lr, warmup=self.warmup, schedule=config.schedule
        )

    def _interval(self, tokens: int | None) -> Fraction:
        """Return an interval in steps; for a share of the run it need not be an integer."""
        if tokens is None:
            return Fraction(self.steps, EVALUATIONS)
        return Fraction(max(1, round(tokens / self.step_tokens)))

    def evaluates(self, done: int) -> bool:
        """Whether the model is evaluated after `done` steps."""
        return self._due(done, self._evaluation)

    def saves(self, done: int) -> bool:
        """Whether a checkpoint is written after `done` steps."""
        return self._due(done, self._checkpoint)

    def keeps(self, done: int) -> bool:
        """Whether the weights after `done` steps are kept."""
        if done == self.steps:
            return True
        if self._keep == "last" or not self.evaluates(done):
            return False
        return self._keep == "all" or done // max(Fraction(1), self._evaluation) % self._keep == 0

    @property
    def points(self) -> list[int]:
        """The steps after which the model is evaluated, ascending."""
        interval = max(Fraction(1), self._evaluation)
        points = [math.ceil(number * interval) for number in range(1, self.steps // interval + 1)]
        return points if points[-1:] == [self.steps] else [*points, self.steps]

    @property
    def tokens(self) -> list[int]:
        """The tokens after which the model or a branch is evaluated, ascending."""
        return [step * self.step_tokens for step in sorted({*self.points, *(branch.steps for branch in self.branches)})]

    @property
    def trained_steps(self) -> int:
        """Number of steps that are trained, of the trunk and all branches."""
        return self.steps + sum(branch.steps - branch.start for branch in self.branches)

    @property
    def kept(self) -> int:
        """Number of evaluation points whose weights are kept, with those of branches."""
        return len(self.branches) + self._kept

    @property
    def _kept(self) -> int:
        if self._keep == "last":
            return 1
        every, interval = 1 if self._keep == "all" else self._keep, max(Fraction(1), self._evaluation)
        number = self.steps // interval
        return number // every + (number % every > 0 or math.ceil(number * interval) < self.steps)

    def _due(self, done: int, interval: Fraction) -> bool:
        return done == self.steps or (done > 0 and done // interval > (done - 1) // interval)

    @property
    def evaluations(self) -> int:
        """Number of evaluations, with those of branches."""
        return len(self.branches) + self._evaluations_after(0.0)

    def evaluations_after(self, share: float) -> int:
        """Return the number of evaluations after more than `share` of the steps; `share` is below 1.

        With schedule wsd, those of branches: a gap is compared at decayed rates.
        """
        if self.branches:
            return sum(branch.steps > share * self.end for branch in self.branches)
        return self._evaluations_after(share)

    def _evaluations_after(self, share: float) -> int:
        before = math.floor(share * self.steps)
        interval = max(Fraction(1), self._evaluation)
        return 1 + (self.steps - 1) // interval - before // interval


class Branch:
    """The steps of a branch: a copy of the trunk whose rate falls to `final_lr` linearly, evaluated at its end.

    It sees the batches that the trunk sees at these steps, so a branch is a run whose budget ends there.

    Attributes:
        start: number of trunk steps before it.
        steps: number of steps at its end, those of the trunk included.
        tokens: tokens at its end.
    """

    def __init__(self, trunk: Timetable, end: int):
        """Take the trunk and the step at which the branch ends."""
        self._trunk = trunk
        decay = max(1, round(trunk.config.decay * end))
        self.start, self.steps = max(0, end - decay), end
        self.step_tokens, self.tokens = trunk.step_tokens, end * trunk.step_tokens

    def rate(self, step: int) -> float:
        """Return the learning rate of update `step`, from 0, counted from the start of the trunk."""
        config, left = self._trunk.config, (self.steps - step) / (self.steps - self.start)
        return min(self._trunk.rate(step), config.lr * (config.final_lr + (1 - config.final_lr) * left))

    def evaluates(self, done: int) -> bool:
        """Whether the model is evaluated after `done` steps."""
        return done == self.steps

    def keeps(self, done: int) -> bool:
        """Whether the weights after `done` steps are kept."""
        return done == self.steps

    def saves(self, done: int) -> bool:
        """Whether a checkpoint is written after `done` steps."""
        return done == self.steps or self._trunk.saves(done)
