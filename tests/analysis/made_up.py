"""Runs with known curves: documents differ far more from each other than architectures do."""

from dataclasses import dataclass

import numpy as np

from basecap.analysis.comparison import Setting
from basecap.analysis.losses import RunLosses
from basecap.records import DocumentLosses

TRAIN, OOD = ("prose",), ("code", "forum")


@dataclass(frozen=True)
class World:
    """What is drawn: documents per domain, checkpoints, seeds, the gap, and how much models differ on a document."""

    documents: int = 400
    checkpoints: int = 8
    seeds: int = 1
    gap: float = 0.01
    slope: float = 0.01
    taste: float = 0.04
    seed_spread: float = 0.0
    wobble: float = 0.0


def curve(x: np.ndarray) -> np.ndarray:
    """Return the reference's expected loss out of domain at pre-training loss x."""
    return 1.2 + 0.55 * x + 0.12 * (x - 2.9) ** 2


def gap(x: np.ndarray, world: World) -> np.ndarray:
    """Return what the other architecture adds."""
    return world.gap + world.slope * (x - 3.5)


def pretraining(speed: float, checkpoints: int) -> np.ndarray:
    """Return the expected pre-training losses of the checkpoints, [K]."""
    return 2.6 + 0.45 * (speed * np.linspace(0.1, 1, checkpoints)) ** -0.5


SPEEDS = {"reference": 1.0, "other": 0.85}


def truth(world: World) -> float:
    """Return the mean of the gap over the shared range."""
    ours, theirs = (pretraining(SPEEDS[name], world.checkpoints) for name in ("other", "reference"))
    low, high = max(ours.min(), theirs.min()), min(ours.max(), theirs.max())
    return float(gap(low + (high - low) * (np.arange(10_000) + 0.5) / 10_000, world).mean())


def runs(world: World, rng: np.random.Generator) -> dict[tuple[str, int], RunLosses]:
    """Draw documents and the losses of both architectures on them.

    A document's loss is the expected loss, its own difficulty (the same for all), the taste of the architecture and
    of the run (half of the variance each, the same at every checkpoint), and noise of each checkpoint's tokens.
    """
    domains = (*TRAIN, *OOD)
    tokens = {d: np.minimum(np.exp(rng.normal(6.3, 0.9, world.documents)), 8000).astype(int) + 1 for d in domains}
    difficulty = {d: rng.normal(0, 0.45, world.documents) for d in domains}
    share = world.taste / np.sqrt(2)
    found = {}
    for name, speed in SPEEDS.items():
        taste = {d: rng.normal(0, share, world.documents) for d in domains}
        for seed in range(world.seeds):
            shift = rng.normal(0, world.seed_spread) if world.seed_spread else 0.0
            x = pretraining(speed, world.checkpoints)
            losses = {}
            for domain in domains:
                expected = x if domain in TRAIN else curve(x) + shift + (gap(x, world) if name == "other" else 0.0)
                own = difficulty[domain] + taste[domain] + rng.normal(0, share, world.documents)
                size = tokens[domain][:, None]
                if domain in OOD and world.wobble:
                    expected = expected + rng.normal(0, world.wobble, len(x))
                noise = np.sqrt(size) * rng.normal(0, 0.1, (world.documents, len(x)))
                nats = size * (expected + own[:, None]) + noise
                losses[domain] = DocumentLosses(nats=nats, tokens=tokens[domain], bytes=4 * tokens[domain])
            found[name, seed] = RunLosses(trained=np.arange(1, len(x) + 1) * 1000, domains=losses)
    return found


def setting(resamples: int = 400, tolerance: float = 0.02) -> Setting:
    """Return the comparison of `other` with `reference`."""
    return Setting(reference="reference", train=TRAIN, ood=OOD, tolerance=tolerance, resamples=resamples)
