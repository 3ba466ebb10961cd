"""Studies with known gaps: documents differ far more from each other than architectures do, and so may runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from basecap.analysis.text.losses import DomainLosses, RunLosses
from basecap.analysis.text.measured import Setting

TRAIN, OOD = ("prose",), ("code", "forum")
REFERENCE = "reference"
#: Bigram loss below which the trained range may begin; all curves are far below it at half of their tokens.
BIGRAM = 4.0


@dataclass(frozen=True)
class World:
    """What is drawn.

    Attributes:
        gaps: true gap of each architecture, in nats.
        noise: standard deviation of a run's loss out of domain: the reference's, then each architecture's.
        seeds, reference_seeds: runs.
        documents: per domain.
        points: evaluation points of a run.
        taste: standard deviation of what an architecture, and as much again a run, makes of a document.
        wobble: standard deviation of single evaluation points of a run.
        tilt: standard deviation of how fast a run's loss out of domain falls, in nats per factor of e in tokens, about
            the middle of the last half of them.
        lean: how much of a run's own loss out of domain is its tilt as well: their correlation.
        wander: standard deviation of what fades in a run's loss out of domain over a quarter of its points: the
            reference's, then each architecture's; () for none.
        drifts: how much larger each gap is at the end of the trained range than at its beginning; () for none.
        cluster: documents that share half of the variance of that taste.
        speeds: how fast each architecture learns, the reference's being 1.
    """

    gaps: Sequence[float] = (0.0, 0.0)
    noise: Sequence[float] = (0.0, 0.0, 0.0)
    seeds: int = 3
    reference_seeds: int = 3
    documents: int = 80
    points: int = 20
    taste: float = 0.04
    wobble: float = 0.01
    tilt: float = 0.0
    lean: float = 0.0
    wander: Sequence[float] = ()
    drifts: Sequence[float] = ()
    cluster: int = 1
    speeds: Sequence[float] = (1.0, 0.9)

    @property
    def names(self) -> list[str]:
        """The architectures but the reference."""
        return [f"other {index}" for index in range(len(self.gaps))]


def curve(x: np.ndarray) -> np.ndarray:
    """Return the reference's expected loss out of domain at pre-training loss x."""
    return 1.2 + 0.55 * x + 0.12 * (x - 2.9) ** 2


def pretraining(speed: float, points: int) -> np.ndarray:
    """Return the expected pre-training losses of the points, [K]."""
    return 2.6 + 0.45 * (speed * np.linspace(1 / points, 1, points)) ** -0.5


def runs(world: World, rng: np.random.Generator) -> dict[tuple[str, int], RunLosses]:
    """Draw documents and the losses of all runs on them.

    A document's loss is the expected loss, its own difficulty (the same for all), the tastes of the architecture and of
    the run (the same at every point), the run's own loss out of domain, and noise of each point's tokens.
    """
    domains = (*TRAIN, *OOD)
    tokens = {d: np.minimum(np.exp(rng.normal(6.3, 0.9, world.documents)), 8000).astype(int) + 1 for d in domains}
    difficulty = {d: rng.normal(0, 0.45, world.documents) for d in domains}
    clusters = np.arange(world.documents) // world.cluster
    found = {}
    for index, name in enumerate([REFERENCE, *world.names]):
        architecture = {d: _taste(world, clusters, rng) for d in domains}
        gap = world.gaps[index - 1] if index else 0.0
        speed = world.speeds[index % len(world.speeds)]
        for seed in range(world.seeds if index else world.reference_seeds):
            own = {d: difficulty[d] + architecture[d] + _taste(world, clusters, rng) for d in domains}
            shift = rng.normal(0, 1)
            tilt = world.lean * shift + np.sqrt(1 - world.lean**2) * rng.normal(0, 1) if world.tilt else 0.0
            moved = gap + world.noise[index] * shift + world.tilt * tilt * _since_middle(world.points)
            if world.wander:
                moved = moved + world.wander[index] * _wandering(world.points, rng)
            if world.drifts and index:
                moved = moved + world.drifts[index - 1] * _through_range(pretraining(speed, world.points))
            found[name, seed] = _run(world, moved, pretraining(speed, world.points), own, tokens, clusters, rng)
    return found


def copied(points: int) -> np.ndarray:
    """Return the share that a model copies which has learned it long before half of its tokens, [K]."""
    return 0.35 * (1 - np.exp(-np.linspace(1 / points, 1, points) / 0.15))


def fall(points: int) -> float:
    """Return how fast the reference's expected loss out of domain falls over the last half of its tokens."""
    half = np.arange(1, points + 1) * 2 >= points
    return float(np.polyfit(np.log(np.arange(1, points + 1)[half]), curve(pretraining(1.0, points))[half], 1)[0])


def _wandering(points: int, rng: np.random.Generator) -> np.ndarray:
    """Return a stationary random walk of variance 1 that forgets within a quarter of the points, [K]."""
    kept = np.exp(-4 / points)
    steps = rng.normal(0, 1, points) * np.sqrt(1 - kept**2)
    values = [rng.normal(0, 1)]
    for step in steps[1:]:
        values.append(kept * values[-1] + step)
    return np.array(values)


def _through_range(x: np.ndarray) -> np.ndarray:
    """Return how far along the trained range of the reference a loss x lies, 0 in its middle, 1/2 at its end."""
    reference = pretraining(1.0, len(x))
    high, low = reference[len(x) // 2 - 1], reference[-1]
    return ((high + low) / 2 - x) / (high - low)


def _since_middle(points: int) -> np.ndarray:
    """Return the logarithm of tokens, zero on average over the last half of them, [K]."""
    places = np.log(np.arange(1, points + 1))
    return places - places[np.arange(1, points + 1) * 2 >= points].mean()


def _taste(world: World, clusters: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    share = 0.5 if world.cluster > 1 else 0.0
    common = rng.normal(0, 1, clusters.max() + 1)[clusters]
    single = rng.normal(0, 1, world.documents)
    return world.taste / np.sqrt(2) * (np.sqrt(share) * common + np.sqrt(1 - share) * single)


def _run(world, gap, x, own, tokens, clusters, rng) -> RunLosses:
    losses = {}
    for domain, size in tokens.items():
        expected = x if domain in TRAIN else curve(x) + gap + rng.normal(0, world.wobble, len(x))
        noise = np.sqrt(size)[:, None] * rng.normal(0, 0.1, (world.documents, len(x)))
        nats = size[:, None] * (expected + own[domain][:, None]) + noise
        losses[domain] = DomainLosses(nats=nats, tokens=size, bytes=4 * size, clusters=clusters)
    trained = np.arange(1, len(x) + 1) * 1000
    return RunLosses(trained=trained, training=x + 0.01, domains=losses, copying=copied(len(x)))


def setting(resamples: int = 200, draws: int = 10_000, **changes) -> Setting:
    """Return the comparison with the reference."""
    return replace(
        Setting(reference=REFERENCE, train=TRAIN, ood=OOD, bigram=BIGRAM, resamples=resamples, draws=draws), **changes
    )
