"""A study on disk with made-up losses, as a real one would leave it."""

from pathlib import Path

import numpy as np

from basecap.records import RunInfo, StudyRecords
from basecap.records.audits import untrained
from basecap.records.documents import DocumentLosses
from basecap.records.measured import Declaration, Record
from basecap.records.token_classes import COPIED, NEW, loss_metric
from basecap.system.files import append_lines

TRAIN, OOD = ["commoncrawl", "c4"], ["arxiv", "github", "stackexchange"]
#: Name -> (how fast it converges, gap in nats).
ARCHITECTURES = {
    "transformer++": (1.00, 0.0),
    "transformer++ window 256": (0.97, 0.085),
    "mamba-2": (1.06, 0.055),
    "top1-element": (0.95, 0.004),
    "top1-chunk-exact": (1.01, 0.003),
    "top1-chunk-approx": (0.98, 0.021),
}
STEPS, STEP_TOKENS = 920, 65_536
OFFSET = {"arxiv": -0.4, "github": -1.1, "stackexchange": 0.1}


def write_study(
    path: Path,
    *,
    architectures: dict[str, tuple[float, float]] = ARCHITECTURES,
    train: list[str] = TRAIN,
    ood: list[str] = OOD,
    seeds: tuple[int, ...] = (0,),
    more_of_reference: int = 0,
    documents: int = 300,
    checkpoints: int = 10,
    more_evaluations: bool = False,
    figure: dict | None = None,
    classes: bool = True,
) -> StudyRecords:
    """Write records of a study whose curves and gaps are known; the first architecture is the reference.

    It has `more_of_reference` runs more than the others. With `classes` the loss is also kept by class of token.
    """
    records = StudyRecords(path)
    records.create(
        {
            "name": "limited-mini",
            "summary": "made-up losses of six architectures",
            "data": {"source": "slimpajama", "path": "corpus", "seq_len": 2048, "train": train, "ood": ood},
            "model": {"hidden": 512, "layers": 8},
            "train": {"tokens": 60_000_000, "batch": 32, "lr": 1e-3},
            "seeds": list(seeds),
            "reference_seeds": [*seeds, *range(len(seeds), len(seeds) + more_of_reference)],
            "architectures": [{"name": name, "use": name, "mixer": {}} for name in architectures],
            "reference": next(iter(architectures), "transformer++"),
            "evals": ["domain-loss"],
            "gap": {"cost": 0.1, "from": 0.5},
            **({} if figure is None else {"figure": figure}),
        }
    )
    records.write_environment(
        {"basecap": "0.1.0", "packages": {"torch": "2.13.0"}, "device": "CPU", "bigram_loss": 50.0}
    )
    declarations = [Declaration(name="domain-loss", unit="nats per token", better="lower")]
    if more_evaluations:
        declarations += [
            Declaration(name="few-shot", unit="accuracy", better="higher"),
            Declaration(name="passkey", unit="accuracy", better="higher", axes=("length",)),
            Declaration(name="audit", unit="share", better="neither"),
        ]
    records.write_declarations(declarations)
    rng = np.random.default_rng(7)
    sizes = {d: np.minimum(np.exp(rng.normal(6.3, 1.0, documents)), 6000).astype(int) + 1 for d in (*train, *ood)}
    difficulty = {d: rng.normal(0, 0.4, documents) for d in (*train, *ood)}
    for name, (speed, gap) in architectures.items():
        taste = {d: rng.normal(0, 0.03, documents) for d in (*train, *ood)}
        more = more_of_reference if name == next(iter(architectures)) else 0
        for seed in (*seeds, *range(len(seeds), len(seeds) + more)):
            run = records.run(name, seed)
            own = {d: difficulty[d] + taste[d] + rng.normal(0, 0.01, documents) for d in (*train, *ood)}
            _write_run(run, name, seed, speed, gap, sizes, own, rng, train, ood, checkpoints, classes)
            if more_evaluations:
                run.append_evals(_more(rng, gap))
    return records


def loss_after(tokens: float | np.ndarray, speed: float) -> float | np.ndarray:
    """Return a loss that falls as a power of tokens."""
    return 2.6 + 9.0 * (tokens * speed / 1e5) ** -0.35


def _write_run(run, name, seed, speed, gap, sizes, own, rng, train, ood, checkpoints, classes) -> None:
    run.write_info(
        RunInfo(
            name=name,
            seed=seed,
            use=name,
            status="finished",
            message="",
            parameters=29_400_000,
            state_bytes=16_777_216,
            device="NVIDIA H200",
            precision="bf16",
        )
    )
    steps = []
    for step in range(1, STEPS + 1):
        tokens = step * STEP_TOKENS
        noisy = min(9.2, loss_after(tokens, speed)) + rng.normal(0, 0.03)
        rest = {"lr": 1e-3, "grad_norm": 0.6, "tokens_per_s": 80_000.0, "seconds": 0.8}
        steps.append({"step": step, "tokens": tokens, "train_loss": noisy, **rest})
    append_lines(run.path / "metrics.jsonl", steps)  # one by one they take a second
    for index in range(1, checkpoints + 1):
        step = STEPS * index // checkpoints
        tokens = step * STEP_TOKENS
        x = loss_after(tokens, speed)
        losses, found = {}, []
        for domain, size in sizes.items():
            mean = x if domain in train else 0.4 + 0.9 * x + 0.03 * x**2 + OFFSET.get(domain, 0.0) + gap
            nats = size * (mean + own[domain]) + np.sqrt(size) * rng.normal(0, 0.05, len(size))
            losses[domain] = DocumentLosses(nats=nats, tokens=size, bytes=size * 4)
            value = nats.sum() / size.sum()
            common = {"step": step, "tokens": tokens, "eval": "domain-loss", "subset": domain, "n": int(size.sum())}
            found.append(Record(**common, metric="loss", value=value, stderr=0.02))
            found.append(Record(**common, metric="bits_per_byte", value=value / 4 / np.log(2), stderr=0.007))
            if classes:
                found += _by_class(common, value, 0.0 if domain in train else gap)
        copied = 0.35 * (1 - np.exp(-index / checkpoints / 0.15))  # learned long before half of the tokens
        where = {"step": step, "tokens": tokens, "eval": "copying", "subset": ood[0] if ood else train[0]}
        found.append(Record(**where, metric="copying", value=copied, n=1000, stderr=0.001))
        run.append_documents("domain-loss", step, losses)
        run.append_evals(found)


def _by_class(common: dict, loss: float, gap: float) -> list[Record]:
    """Return the losses of two classes, of which copied tokens have the whole gap; none is misled."""
    half = common["n"] // 2
    counts = {COPIED: half, NEW: common["n"] - half}
    rest = loss - gap
    values = {COPIED: rest + gap * common["n"] / half, NEW: rest}
    return [Record(**common | {"n": counts[name]}, metric=loss_metric(name), value=values[name]) for name in counts]


def _more(rng, gap) -> list[Record]:
    common = {"step": STEPS, "tokens": STEPS * STEP_TOKENS}
    tasks = {"arc_easy": 0.45, "piqa": 0.62, "sciq": 0.7}
    few_shot = [
        Record(**common, eval="few-shot", subset=task, metric="acc", value=base - gap, n=1000, stderr=0.015)
        for task, base in tasks.items()
    ]
    passkey = [
        Record(
            **common,
            eval="passkey",
            subset="niah",
            metric="accuracy",
            value=max(0.0, 0.9 - gap * 5 - length / 40_000 + rng.normal(0, 0.01)),
            n=500,
            stderr=0.02,
            axis={"length": length},
        )
        for length in (1024, 2048, 4096, 8192, 16384)
    ]
    numbers = {"visibility": 1.0, "relation": 0.9, "selection": 0.98 - 2 * gap, "null": 0.01}
    audit = [
        Record(**common, eval="audit", subset="layer 0", metric=call(metric), value=value, n=6)
        for metric, value in numbers.items()
        for call in (str, untrained)
    ]
    return few_shot + passkey + audit
