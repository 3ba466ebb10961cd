"""Whether runs differ less after more tokens: `python -m tests.analysis.text.noise_by_tokens DIR`.

A study of text is cut after a part of its tokens, and each of its runs gives the number that a report would give: its
mean loss on unseen domains over the second half of these tokens, at equal held-out loss. Printed are standard
deviations of that number over the runs of an architecture. What is cut had a learning rate that was still high.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from basecap.analysis.runs import read_runs
from basecap.analysis.text import gap
from basecap.analysis.text.draws import Curve, draw
from basecap.analysis.text.losses import load
from basecap.records import StudyRecords

#: Parts of the tokens after which runs are cut.
PARTS = (0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


def curves_of(directory: Path, most: float | None = None) -> tuple[dict[str, list[Curve]], str, list[str]]:
    """Return runs by architecture, the reference, and the unseen domains.

    They are those that have finished, or all of them, cut after `most` tokens.
    """
    records = StudyRecords(directory)
    study = records.study()
    train, ood = study["data"]["train"], study["data"]["ood"]
    runs = {}
    for run in read_runs(records, [entry["name"] for entry in study["architectures"]]):
        losses = load(run.records, run.evals, run.log, [*train, *ood])
        if losses is not None and (losses.finished or most is not None):
            runs[run.info.name, run.info.seed] = losses
    found: dict[str, list[Curve]] = {}
    for (name, _), curve in draw(runs, train, ood, 0, np.random.default_rng(0)).items():
        found.setdefault(name, []).append(curve if most is None else cut(curve, most))
    return found, study["reference"], ood


def cut(curve: Curve, tokens: float) -> Curve:
    """Return a curve up to so many tokens."""
    kept = curve.trained <= tokens
    return Curve(x=curve.x[:, kept], y=curve.y[..., kept], trained=curve.trained[kept])


def deviations(runs: Sequence[Curve], tokens: float) -> np.ndarray:
    """Return the standard deviation over runs cut after `tokens`: of the mean over domains, then of each, [1 + D]."""
    early = [cut(run, tokens) for run in runs]
    where = gap.Range(low=gap.final(early), high=gap.upper_end(early, 0.5, None))
    levels = np.stack([gap.level(run, where)[0, 0] for run in early])
    return np.concatenate([levels.mean(1, keepdims=True), levels], axis=1).std(axis=0, ddof=1)


def print_table(found: Mapping[str, Sequence[Curve]], reference: str, ood: Sequence[str]) -> None:
    """Print a row per part of the tokens: the reference's deviations, and the others' root mean square."""
    repeated = [runs for name, runs in found.items() if name != reference and len(runs) > 1]
    freedom = sum(len(runs) - 1 for runs in repeated)
    print(f"{reference}: {len(found[reference])} runs; others: {freedom} degrees of freedom; nats per token")
    print("tokens", "reference", *ood, "others", sep="\t")
    most = max(run.trained[-1] for runs in found.values() for run in runs)
    for part in PARTS:
        own = deviations(found[reference], part * most)
        squares = [(len(runs) - 1) * deviations(runs, part * most)[0] ** 2 for runs in repeated]
        others = np.sqrt(sum(squares) / max(1, freedom))
        print(f"{part * most / 1e6:.0f}M", *(f"{value:.3f}" for value in (*own, others)), sep="\t")


if __name__ == "__main__":
    print_table(*curves_of(Path(sys.argv[1])))
