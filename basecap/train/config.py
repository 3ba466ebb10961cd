"""The options of training."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from basecap.data.config import Count, Number
from basecap.errors import ConfigError

Beta = Annotated[Number, Field(ge=0, lt=1)]
#: Batches are drawn by the hash of a seed of 64 bits.
Seed = Annotated[Count, Field(ge=-(2**63), lt=2**63)]


class TrainConfig(BaseModel):
    """How a run trains. Defaults follow the first paper (appendix A); what it leaves open is marked *our choice*."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tokens: Count = Field(ge=1, description="training tokens, rounded up to whole batches")
    batch: Count = Field(256, ge=1, le=2**20, description="sequences per optimiser step, over all devices")
    micro_batch: Count | None = Field(
        None,
        ge=1,
        description="sequences per forward pass and device; all of a device's share when not given",
    )
    lr: Number = Field(2e-4, gt=0, description="peak learning rate")
    final_lr: Number = Field(0.0, ge=0, le=1, description="learning rate at the end, as a share of the peak")
    warmup: Count = Field(2500, ge=0, description="steps of linear warm-up; at most a tenth of the run")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="linear, cosine or constant (none): decay after the warm-up"
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay rates of Adam's moments")
    weight_decay: Number = Field(0.1, ge=0, description="decoupled, on matrices (our choice)")
    clip: Number = Field(1.0, gt=0, description="largest gradient norm (our choice)")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="of the products; master weights are fp32. auto: bf16 on a GPU, else fp32"
    )
    seeds: tuple[Seed, ...] = Field((0,), min_length=1, description="one run per architecture and seed")
    eval_every: Count | None = Field(
        None, ge=1, description="tokens between evaluations; a tenth of the run when not given"
    )
    checkpoint_every: Count | None = Field(
        None,
        ge=1,
        description="tokens between checkpoints; when not given before every evaluation and every ten minutes",
    )
    average: Number | None = Field(
        None,
        gt=0,
        le=0.25,
        description="evaluate a running average of the weights (arXiv 2312.02696): its width, as a share of the steps "
        "so far, such as 0.05; the weights themselves when not given",
    )
    checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    compile: bool | None = Field(None, description="torch.compile; on a GPU when not given")

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError("a seed is named twice; remove one")
        return value

    @model_validator(mode="after")
    def _batches_divide(self) -> "TrainConfig":
        self.forward_batch(1)
        return self

    def forward_batch(self, world: int) -> int:
        """Return the sequences of one forward pass in each of `world` processes; ConfigError unless they divide."""
        share, left = divmod(self.batch, world)
        if left:
            raise ConfigError(f"train.batch = {self.batch} does not divide among {world} processes; change it.")
        size = self.micro_batch or share
        if share % size:
            raise ConfigError(
                f"train.micro_batch = {size} does not divide each process's {share} sequences; choose a divisor."
            )
        return size


class Timetable:
    """A run in steps: how many there are, and after which ones it evaluates and saves."""

    def __init__(self, config: TrainConfig, seq_len: int):
        self.step_tokens = config.batch * seq_len
        self.steps = -(-config.tokens // self.step_tokens)
        evaluation = config.eval_every or max(1, config.tokens // 10)
        self._evaluation = self._steps(evaluation)
        self._checkpoint = self._steps(config.checkpoint_every or evaluation)

    def _steps(self, tokens: int) -> int:
        return max(1, round(tokens / self.step_tokens))

    def evaluates(self, done: int) -> bool:
        """Whether the model is evaluated after `done` steps."""
        return done == self.steps or (done > 0 and done % self._evaluation == 0)

    def saves(self, done: int) -> bool:
        """Whether a checkpoint is written after `done` steps."""
        return done == self.steps or (done > 0 and done % self._checkpoint == 0)

    @property
    def evaluations(self) -> int:
        """How often the model is evaluated."""
        return -(-self.steps // self._evaluation)
