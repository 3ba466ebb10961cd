"""The sweep of learning rates: each rate with the first seed, then the best of each architecture for all its seeds.

The runs of a sweep are in DIR/sweep. When all runs of an architecture have ended, sweep.json gets its choice and the
run of the chosen rate moves to DIR/runs, as the first seed's. `choose_rates` completes a move that a kill interrupted.

With train.stop_at the rates of an architecture are tried in turn, and the first that reaches it ends the sweep.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from basecap.data import PreparedData
from basecap.data.task_data import TaskData
from basecap.data.workload import Batch
from basecap.evals import Context, Evaluation, EvaluationConfig, Measurement, Outcome, build_evaluation
from basecap.models.language_model import LanguageModel
from basecap.plan.runs import RunSpec
from basecap.records import RunInfo, RunRecords, StudyRecords, Sweep
from basecap.records.measured import Declaration, Record
from basecap.system.files import move_directory, writing

#: Tokens of validation examples in one forward pass.
TOKENS = 2**15


class HeldOutLoss(Evaluation[PreparedData]):
    """What rates are compared by in a study of text: the mean loss on held-out documents of the training domains.

    These are the validation documents where each training domain has some, else the test documents; never those of
    unseen domains.
    """

    declaration = Declaration(name="sweep", unit="nats per token", better="lower")

    def __init__(self) -> None:
        super().__init__(EvaluationConfig())

    def run(self, model: LanguageModel, context: Context[PreparedData]) -> Outcome:
        """Return one number, whose subset is the split that it is of."""
        data = copy.copy(context.data)
        data.ood_domains = ()
        split = "validation" if all(data.sets.get((name, "validation")) for name in data.train_domains) else "test"
        domains = build_evaluation({"domain-loss": {"split": split}}).run(model, replace(context, data=data)).documents
        tokens = sum(int(losses.tokens.sum()) for losses in domains.values())
        nats = sum(float(losses.nats.sum()) for losses in domains.values())
        return Outcome(measurements=[Measurement(subset=split, metric="loss", value=nats / tokens, n=tokens)])


class ValidationLoss(Evaluation[TaskData]):
    """What rates are compared by in a study of tasks: the mean loss on validation examples of the run's own task."""

    declaration = HeldOutLoss.declaration

    def __init__(self) -> None:
        super().__init__(EvaluationConfig())

    def run(self, model: LanguageModel, context: Context[TaskData]) -> Outcome:
        """Return one number, over all targets of all cells."""
        nats, count = 0.0, 0
        for cell in context.data.cells:
            examples = context.data.held_out("validation", cell)
            rows = max(1, TOKENS // cell.length)
            for part in Batch(torch.from_numpy(examples.inputs), torch.from_numpy(examples.targets)).split(rows):
                with context.autocast():
                    losses = model.token_losses(part.inputs.to(context.device), part.targets.to(context.device))
                nats += losses.double().sum().item()
                count += int((part.targets >= 0).sum())
        return Outcome(measurements=[Measurement(subset="validation", metric="loss", value=nats / count, n=count)])


def held_out_loss(task: str | None) -> Evaluation:
    """Return what the rates of a run on `task`, or on text, are compared by."""
    return HeldOutLoss() if task is None else ValidationLoss()


def chosen_rates(records: StudyRecords) -> dict[str, float]:
    """Return the learning rates that sweeps have chosen, by architecture."""
    return {sweep.name: sweep.chosen for sweep in records.sweeps()}


def train_rates(
    runs: Sequence[RunSpec], train: Callable[[Sequence[RunSpec]], list[RunInfo]]
) -> tuple[list[RunSpec], list[RunInfo]]:
    """Train the runs of sweeps with `train`; return those that were tried, and the info of each."""
    if all(run.train.stop_at is None for run in runs):
        return list(runs), train(runs)
    tried: list[RunSpec] = []
    infos: list[RunInfo] = []
    for rate in dict.fromkeys(run.train.lr for run in runs):
        reached = {info.name for info in infos if info.stopped is not None}
        due = [run for run in runs if run.train.lr == rate and run.name not in reached]
        tried += due
        infos += train(due)
    return tried, infos


def choose_rates(records: StudyRecords, runs: Sequence[RunSpec], log: Callable[[str], None]) -> None:
    """Choose a rate for each architecture whose sweep has ended, log it, and move the chosen runs.

    Args:
        records: of the study.
        runs: the runs of sweeps that were tried.
        log: takes a sentence per architecture.
    """
    with records.locked(log):
        sweeps = records.sweeps()
        held = {sweep.name for sweep in sweeps}  # another command may have chosen it
        for name in dict.fromkeys(run.name for run in runs if run.name not in held):
            found, sentence = _choose(records, [run for run in runs if run.name == name])
            log(f"{name}: {sentence}")
            if found is not None:
                sweeps.append(found)
                records.write_sweeps(sweeps)
        for sweep in sweeps:
            _move(records, sweep)


def _choose(records: StudyRecords, runs: Sequence[RunSpec]) -> tuple[Sweep | None, str]:
    """Return the sweep of one architecture and a sentence about it; None if no rate can be chosen."""
    places = [records.run(run.name, run.seed, run.rate) for run in runs]
    infos = [info for place in places if (info := place.info()) is not None]
    if len(infos) < len(places) or not all(info.finished or info.diverged for info in infos):
        return (
            None,
            "no learning rate is chosen, as a run of its sweep failed; run the same command again to resume it.",
        )
    rates = tuple(run.train.lr for run in runs)
    found = [_held_out(place) if info.finished else None for place, info in zip(places, infos, strict=True)]
    losses = {rate: record for rate, record in zip(rates, found, strict=True) if record is not None}
    if not losses:
        return None, "no learning rate is chosen, as all of its sweep diverged; add lower ones and give another --out."
    chosen = min(losses, key=lambda rate: (losses[rate].value, rate))
    sweep = Sweep(
        name=runs[0].name,
        seed=runs[0].seed,
        split=losses[chosen].subset,
        rates=rates,
        losses=tuple(None if record is None else record.value for record in found),
        chosen=chosen,
        reached=any(info.stopped is not None for info in infos),
    )
    items = "documents" if runs[0].task is None else "examples"
    others = f"is the best of {', '.join(f'{rate:g}' for rate in rates)}"
    best = f"learning rate {chosen:g} {others if len(rates) > 1 else 'is the first tried and reached train.stop_at'}"
    edge = ", at the edge of the sweep; widen train.lr, with another --out, to be sure" if sweep.at_edge else ""
    return sweep, f"{best} (loss {losses[chosen].value:.3f} on {sweep.split} {items}){edge}."


def _held_out(records: RunRecords) -> Record | None:
    """Return the loss of a finished run of a sweep, None where it is not finite."""
    found = [record for record in records.evals() if record.eval == HeldOutLoss.declaration.name]
    return found[-1] if found and math.isfinite(found[-1].value) else None


def _move(records: StudyRecords, sweep: Sweep) -> None:
    """Move the run of the chosen rate to the runs of the study, unless it is there."""
    swept, place = records.run(sweep.name, sweep.seed, sweep.chosen), records.run(sweep.name, sweep.seed)
    if swept.info() is not None and place.info() is None:
        with writing(place.path):
            move_directory(swept.path, place.path)
