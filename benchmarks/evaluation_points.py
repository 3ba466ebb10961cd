"""Time an evaluation point of limited-zoo's 30M models beside training steps, and a checkpoint.

A point is measured without compiled code, with it, and on a GPU with its passes as CUDA graphs, as training has them.

Run `python -m benchmarks.evaluation_points OUT.json` on a machine with a GPU. Held-out documents are of random tokens,
as many and as long as those of limited-zoo. Each architecture is measured alone, and its compiled losses are compared
with the others. Only numbers of one call can be compared, as machines and moments differ.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from basecap.evals import Context, Evaluation, Outcome, ReplayedPasses, build_evaluation
from basecap.models.language_model import LanguageModel
from basecap.plan.runs import RunSpec, plan_runs
from basecap.records import RunRecords
from basecap.run.trial import training_step
from basecap.study.config import load_study
from basecap.system.environment import choose_device, describe
from basecap.train.copies import Copies
from basecap.train.distributed import Processes
from basecap.train.loop import DevicePlacement
from basecap.train.optim import build_optimiser

#: The records that say how long held-out documents are.
RECORDS = Path(__file__).parent.parent / "results" / "limited-zoo-150M" / "records-reference-1.tar.xz"
#: Largest difference of a compiled mean loss from the other, in nats.
ALLOWED = 0.01
ROUNDS, STEPS = 3, 8


@dataclass(frozen=True)
class Documents:
    """Documents of random tokens, as `basecap.data.DocumentSet` has them."""

    sizes: np.ndarray
    vocabulary: int

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def clusters(self) -> np.ndarray:
        """Each document is its own."""
        return np.arange(len(self))

    def tokens(self, index: int) -> np.ndarray:
        """Return the tokens of a document: int64 [tokens]."""
        return np.random.default_rng(index).integers(1, self.vocabulary, self.sizes[index])

    def bytes(self, index: int) -> int:
        """Return about the length that such a document has."""
        return 4 * int(self.sizes[index])


@dataclass(frozen=True)
class Text:
    """What evaluations read of `basecap.data.PreparedData`; it is its own tokenizer."""

    sets: dict[str, Documents]
    vocabulary: int
    manifest_hash: str = "random"
    end_of_text: int = 0

    @property
    def domains(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self.sets)

    @property
    def tokenizer(self) -> "Text":
        """What has `end_of_text`."""
        return self

    def documents(self, split: str, domain: str) -> Documents:
        """Return the documents of a domain, the same for every split."""
        return self.sets[domain]


def text(vocabulary: int, most: int | None) -> Text:
    """Return at most `most` documents a domain."""
    with tempfile.TemporaryDirectory() as directory, tarfile.open(RECORDS) as archive:
        archive.extractall(directory, filter="data")
        run = RunRecords(next(path for path in sorted(Path(directory).glob("**/runs/*"))))
        (history,) = run.documents("domain-loss", [max(record.step for record in run.evals())])
        found = history.documents
        return Text(
            {name: Documents(found.tokens[part][:most], vocabulary) for name, part in found.subsets.items()}, vocabulary
        )


def seconds(job: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
    """Return the seconds of each call of a job, to a tenth of a millisecond."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        job()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(round(time.perf_counter() - began, 4))
    return taken


def point(model: LanguageModel, evaluations: Sequence[Evaluation], context: Context) -> dict[str, Outcome]:
    """Return what a model is measured by at a point."""
    with torch.no_grad():
        return {found.declaration.name: found.run(model.eval(), context) for found in evaluations}


def digest(outcomes: dict[str, Outcome]) -> str:
    """Return a hash of all bits of what was measured, to compare two versions of the code on one machine."""
    values = [found.value for outcome in outcomes.values() for found in outcome.measurements]
    return hashlib.sha256(np.array(values).tobytes()).hexdigest()[:16]


def measure(run: RunSpec, data: Text, device: torch.device) -> dict[str, Any]:
    """Return the seconds of one architecture."""
    placement = DevicePlacement.choose(device, Processes(), run.train.precision)
    context: Context[Any] = Context(data=data, device=device, autocast=placement.autocast)
    evaluations = [build_evaluation(name) for name in ("domain-loss", "copying")]
    model = LanguageModel(run.model).initialise(0).to(device)
    optimiser = build_optimiser(model, model.recipe(), run.train)
    row: dict[str, Any] = {"parameters": model.parameters_count()}
    row["first point s"] = seconds(partial(point, model, evaluations, context), 1, device)
    plain = point(model, evaluations, context)
    for found in evaluations:
        row[f"{found.declaration.name} s"] = seconds(partial(point, model, [found], context), ROUNDS, device)

    model.train().compile_training()
    step = partial(training_step, model, optimiser, run, placement)
    row["first step s"] = seconds(step, 1, device)
    row["step s"] = seconds(step, STEPS, device)
    model.load_state_dict(LanguageModel(run.model).initialise(0).state_dict())
    with torch.no_grad():
        row["compiling evaluations s"] = seconds(partial(evaluations[0].trial, model.eval(), context), 1, device)
    compiled = point(model, evaluations, context)
    row["largest difference"] = max(
        abs(ours.value - theirs.value)
        for name in plain
        for ours, theirs in zip(compiled[name].measurements, plain[name].measurements, strict=True)
    )
    row["compiled losses"] = digest(compiled)
    for found in evaluations:
        row[f"{found.declaration.name} compiled s"] = seconds(partial(point, model, [found], context), ROUNDS, device)
    if device.type == "cuda":
        replayed = replace(context, replays=ReplayedPasses(model, print))
        row["capturing graphs s"] = seconds(partial(point, model, evaluations, replayed), 1, device)
        graphs = point(model, evaluations, replayed)
        row["graphs give the same bits"] = all(
            graphs[name].measurements == compiled[name].measurements for name in plain
        )
        for found in evaluations:
            row[f"{found.declaration.name} graphs s"] = seconds(
                partial(point, model, [found], replayed), ROUNDS, device
            )
    layout = Copies(model, Processes(), compiles=False)
    with tempfile.TemporaryDirectory() as directory:
        save = partial(layout.save, RunRecords(Path(directory)), optimiser, 1, None)
        for _ in range(ROUNDS):
            row["checkpoint s"] = row.get("checkpoint s", []) + seconds(save, 1, device)
            row["written beside steps s"] = row.get("written beside steps s", []) + seconds(layout.settle, 1, device)
    return row | _shares(row, run)


def _shares(row: dict[str, Any], run: RunSpec) -> dict[str, float]:
    """Return the share of 20 points and 20 checkpoints in a run of 60M tokens without its start, of each kind."""
    median = {key: statistics.median(value) for key, value in row.items() if isinstance(value, list)}
    steps = 60e6 / run.timetable.step_tokens * median["step s"]
    found = {}
    for name, kind in (("not compiled", ""), ("compiled", " compiled"), ("graphs", " graphs")):
        if f"domain-loss{kind} s" not in median:
            continue
        evaluating = 20 * (median[f"domain-loss{kind} s"] + median[f"copying{kind} s"])
        whole = steps + evaluating + 20 * median["checkpoint s"]
        found[f"share of points, {name}"] = round(evaluating / whole, 4)
        found[f"share of steps, {name}"] = round(steps / whole, 4)
    return found


def main() -> int:
    """Write the numbers; return 1 if compiled losses differ, or those of graphs from them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=["transformer++", "mamba-2", "rwkv-7", "top1-chunk-exact"])
    parser.add_argument("--set", nargs="*", default=[], help="settings of the study, such as model.hidden=64")
    parser.add_argument("--documents", type=int, help="most documents of a domain")
    options = parser.parse_args()
    device = choose_device(None)
    study = load_study("limited-zoo", options.set)
    runs = {run.architecture: run for run in reversed(plan_runs(study, study.vocabulary))}
    data = text(study.vocabulary, options.documents)
    found: dict[str, Any] = {"machine": describe(device), "tokens": {}, "architectures": {}}
    found["tokens"] = {name: int(part.sizes.sum()) for name, part in data.sets.items()}
    for name in options.only:
        found["architectures"][name] = row = measure(runs[name], data, device)
        print(name, json.dumps(row), flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    rows = found["architectures"].values()
    return int(
        any(row["largest difference"] > ALLOWED or not row.get("graphs give the same bits", True) for row in rows)
    )


if __name__ == "__main__":
    sys.exit(main())
