"""Does `train.average` lower the scatter between seeds? Usage: python benchmarks/average.py DIRECTORY [SEEDS].

Trains two of the quickstart's architectures from several seeds and evaluates at every point the weights themselves and
averages of several widths. Out-of-domain loss y is read off each run's curve at equal in-domain loss x, as verdicts
are; printed are its standard deviation between seeds, pooled over levels of x, and what averaging does to its mean.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from basecap.evals import Context, build_evaluation
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.study.config import load_study
from basecap.study.plan import RunSpec, plan_runs
from basecap.study.workloads import data_of
from basecap.train.average import WeightAverage
from basecap.train.distributed import Processes
from basecap.train.loop import Place, Trainer

WIDTHS = (0.05, 0.1, 0.2)
NAMES = ("transformer++", "mamba-2")
SETTINGS = ("train.tokens=200000", "train.eval_every=25000", "data.max_test_tokens=10000")
#: Levels of x at which y is compared, between the losses that all runs reach in the second half of training.
LEVELS = 5


def curves(run: RunSpec, directory: Path, context: Context) -> np.ndarray:
    """Return the losses of a run: [weightings, points, domains]."""
    evaluation = build_evaluation("domain-loss")
    place = Place.choose(torch.device("cpu"), Processes(), "fp32")
    model = LanguageModel(run.model).initialise(run.seed)
    records = RunRecords(directory / f"{run.name}-{run.seed}")
    trainer = Trainer(model, run.train, run.seed, workload=context.data, records=records, place=place)
    averages = [WeightAverage(model, width) for width in WIDTHS]
    steps, points = [0], []

    def update(*_: object) -> None:
        steps[0] += 1
        for average in averages:
            average.update(steps[0])

    def losses() -> list[float]:
        return [found.value for found in evaluation.run(model, context).measurements if found.metric == "loss"]

    def evaluate(model: LanguageModel, step: int, tokens: int) -> None:
        rows = [losses()]
        for average in averages:
            with average.applied():
                rows.append(losses())
        points.append(rows)

    trainer.optimiser.register_step_post_hook(update)
    trainer.run(run.label, evaluate)
    return np.array(points).swapaxes(0, 1)


def at_equal_loss(x: np.ndarray, y: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return y at the levels of x, of curves x and y [runs, points] along which x falls: [runs, levels]."""
    return np.stack([np.interp(levels, a[::-1], b[::-1]) for a, b in zip(x, y, strict=True)])


def main(directory: Path, seeds: int) -> None:
    """Train, evaluate and print."""
    torch.set_num_threads(1)
    study = load_study("quickstart", (*SETTINGS, f"train.seeds={list(range(seeds))}"))
    data = data_of(study, directory)
    context = Context(data=data, device=torch.device("cpu"), autocast=lambda: torch.autocast("cpu", enabled=False))
    found: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}
    for run in plan_runs(study, data.tokenizer.vocab_size):
        if run.name in NAMES:
            file = directory / f"{run.name}-{run.seed}.npy"
            if not file.exists():
                np.save(file, curves(run, directory / "runs", context))
            found[run.name].append(np.load(file))
    print(f"quickstart with {', '.join(SETTINGS)}; {seeds} seeds; x: {study.data.train[0]}, nats per token")
    print(f"{'architecture':14} {'y':8} {'width':>6} {'x at the end':>12} {'y at equal x':>12} {'sd of seeds':>11}")
    for name, runs in found.items():
        losses = np.stack(runs)  # [seeds, weightings, points, domains]
        half = losses.shape[2] // 2
        x = losses[..., 0]
        levels = np.linspace(x[..., half].min(), x[..., -1].max(), LEVELS)
        for domain, label in enumerate(study.data.ood, start=1):
            for index, width in enumerate((0.0, *WIDTHS)):
                y = at_equal_loss(x[:, index], losses[:, index, :, domain], levels)
                spread = np.sqrt(y.var(axis=0, ddof=1).mean())
                print(
                    f"{name:14} {label:8} {width:6.3f} {x[:, index, -1].mean():12.4f} {y.mean():12.4f} {spread:11.4f}"
                )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 6)
