"""The proof that `basecap run` makes before training: a model that sees the future would win every comparison.

The model has the width, depth and options of the study and random parameters; it reads random inputs in the place of
embeddings, at the lengths and batch sizes of the study. The test is that of `basecap check` with another tolerance: a
mixer that computes in single precision internally trains in that way, so it must not be refused.

A proof has three values: refused, proved, and not proved, where something raised or did not fit into `BUDGET`.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from basecap.errors import describe_error
from basecap.mixers import ARCHITECTURES
from basecap.models import BACKBONES
from basecap.models.config import ModelConfig
from basecap.testing.claims import Claims, Fault, evaluation, find_fault, packed, packed_gradients, training
from basecap.testing.subject import Autocast, Inputs, OutOfTimeError, ProofSetting

#: The longest test sequence in float64; the studies train on 2,048 tokens, and most blocks are shorter.
LONGEST = 4096
#: Lengths of the sequences that are cut at every position, for leaks between neighbours at the edges of chunks: longer
#: than those of 128 tokens, with a part of one at the end; then for models that want whole ones.
NEAR = (136, 128)
#: Seconds that the proof of one architecture may take.
BUDGET = 120.0
#: Most tokens of a pass, and fewest rows where they fit: a leak may begin with more than 8 rows.
TOKENS, LEAST_ROWS = 16_384, 9


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How a study computes on its device: what its training passes run in, and how many sequences one holds."""

    autocast: Autocast
    bf16: bool
    rows: int


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was proved of a model.

    Attributes:
        refused: what leaks, as the end of a sentence that begins with its name; None if nothing was found.
        unproved: what could not be tested, and why.
        covered: the settings in which the model was tested.
        layers: how many it has; each was tested with its own index.
        seconds: what that took.
        seed: of inputs and cuts.
    """

    refused: str | None = None
    unproved: tuple[str, ...] = ()
    covered: tuple[str, ...] = ()
    layers: int = 0
    seconds: float = 0.0
    seed: int = 0

    def record(self) -> dict[str, Any]:
        """Return what is kept with the study's records of a model that is not refused."""
        kept = asdict(self) | {"unproved": list(self.unproved), "covered": list(self.covered)}
        del kept["refused"]
        return kept


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """Alternative settings, the first that runs counts; claims that the study needs, and others."""

    settings: Sequence[ProofSetting]
    claims: Sequence[Claims]
    others: Sequence[Claims] = ()


def prove_causality(
    config: ModelConfig, device: torch.device, precision: Precision, lengths: Sequence[int], seed: int
) -> Proof:
    """Prove that no output of a model depends on later inputs or on other sequences, as far as `BUDGET` lasts.

    In evaluation and in training mode, no sequence may change the outputs of another, later inputs must not change
    earlier outputs, and earlier outputs must have no gradients with respect to them. The same is tested between packed
    documents, both ways, and within them; no study packs its text, so a model that takes no segments is proved too.

    Args:
        config: of the model; its width, depth and options are kept, its vocabulary is not.
        device: where it will be trained.
        precision: how it will be trained; the proof runs in float64 too, or in float32 if float64 raises.
        lengths: of the sequences that the study trains on and is evaluated on.
        seed: of inputs and cuts.
    """
    started = time.monotonic()
    covered: list[str] = []
    unproved: list[str] = []
    found = None
    for stage in _stages(precision, sorted(set(lengths), reverse=True), seed, started + BUDGET):
        found = _prove(config, device, stage, covered, unproved)
        if found is not None:
            break
    return Proof(
        refused=found,
        unproved=tuple(unproved),
        covered=tuple(dict.fromkeys(covered)),
        layers=config.depth,
        seconds=round(time.monotonic() - started, 1),
        seed=seed,
    )


def built_in(config: ModelConfig) -> bool:
    """Whether no part of a model comes from a plugin file or from another package."""
    return BACKBONES.built_in(config.backbone) and all(ARCHITECTURES.built_in(layer.use) for layer in config.layers)


def _stages(precision: Precision, lengths: Sequence[int], seed: int, deadline: float) -> Iterator[_Stage]:
    """Yield what is to be proved, the most informative first; `lengths` begin with the longest."""
    make = partial(ProofSetting, seed=seed, deadline=deadline)
    own = partial(make, dtype=torch.float32, words="bf16" if precision.bf16 else "fp32", autocast=precision.autocast)

    def wide(length: int, count: int = 0, inputs: Inputs = "normal", everywhere: bool = False) -> list[ProofSetting]:
        kinds = (torch.float64, torch.float32)  # a kernel may not support double precision
        one = make(length=length, rows=count or rows(length), inputs=inputs, everywhere=everywhere)
        return [replace(one, dtype=kind, words=str(kind).removeprefix("torch.")) for kind in kinds]

    def rows(length: int) -> int:
        return min(max(precision.rows, LEAST_ROWS), max(1, TOKENS // length))

    every = (evaluation, training, packed, packed_gradients)
    most, *shorter = dict.fromkeys(min(length, LONGEST) for length in lengths)
    near = dict.fromkeys(min(lengths[0], length) for length in NEAR)
    yield _Stage(settings=wide(most), claims=every[:2], others=every[2:])
    everywhere = [setting for length in near for setting in wide(length, everywhere=True)]
    yield _Stage(settings=everywhere, claims=(evaluation,), others=(packed,))
    repeated = [replace(setting, inputs="repeated") for setting in everywhere]
    yield _Stage(settings=repeated, claims=(evaluation,))
    yield _Stage(
        settings=[own(length=length, rows=rows(length), everywhere=True) for length in near], claims=(evaluation,)
    )
    held = own(length=lengths[0], rows=min(precision.rows, rows(lengths[0])))
    yield _Stage(settings=[held], claims=every[:2], others=every[2:])
    yield _Stage(settings=wide(most, 1, inputs="repeated"), claims=(evaluation,))
    for length in shorter:
        yield _Stage(settings=wide(length, inputs="repeated"), claims=(evaluation,))


def _prove(
    config: ModelConfig, device: torch.device, stage: _Stage, covered: list[str], unproved: list[str]
) -> str | None:
    """Return what leaks in a stage; add the settings that were tested, and what could not be."""
    missing: list[str] = []
    for claims in (*stage.claims, *stage.others):
        find = partial(find_fault, config, device, claims)
        found = _first_that_runs(find, stage.settings)
        if isinstance(found, Fault):
            other = partial(find_fault, config, device, training)
            alone = found.mode == "training" or (
                found.mode and not isinstance(_first_that_runs(other, stage.settings), Fault)
            )
            return f"{found.what}{f' in {found.mode} mode only' if alone else ''}: {found.how}"
        if isinstance(found, ProofSetting):
            covered.append(found.describe())
        elif claims in stage.claims:
            missing.append(found)
    unproved += missing[:1]
    return None


def _first_that_runs(find: "partial[Fault | None]", settings: Sequence[ProofSetting]) -> Fault | ProofSetting | str:
    """Return the fault, else the setting in which there is none, else why nothing ran."""
    reason = ""
    for setting in settings:
        try:
            return _with_fewer_rows(find, setting)
        except OutOfTimeError:
            return f"{setting.describe()}: the {BUDGET:.0f} s of a proof are over"
        except (Exception, SystemExit) as error:  # whatever a plugin's code raises
            reason = f"{setting.describe()}: {describe_error(error)}"
    return reason


def _with_fewer_rows(find: "partial[Fault | None]", setting: ProofSetting) -> Fault | ProofSetting:
    """Return the fault or the setting, with half of the rows as long as the memory is full."""
    while True:
        try:
            return find(setting) or setting
        except torch.OutOfMemoryError:
            if setting.rows == 1:
                raise
            setting = replace(setting, rows=setting.rows // 2)
