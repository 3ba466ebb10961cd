"""The architectures of a study against its reference: gaps with intervals, verdicts, or why there is none."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from basecap.analysis.gap import (
    Interval,
    Scatter,
    compare,
    interval,
    resample,
    scatter,
    shared_places,
    tokens_to_reach,
    verdict,
)
from basecap.analysis.losses import RunLosses

#: With fewer documents an interval from drawing them is too narrow to be believed.
FEWEST_DOCUMENTS = 30
#: Likewise of a single training domain among others. Each is drawn from its own documents: a domain of one document
#: would not vary at all, and where it held half of the tokens an interval would be true in 45 % of studies, not 95 %.
FEWEST_OF_A_DOMAIN = 10
#: A seed counts once both its runs have seen this share of the tokens that those of the furthest seed have seen: all
#: seeds are compared over one range, and one that has only begun would cut it short for all.
LEAST_PROGRESS = 0.5

#: The losses of every run that has some, by architecture and seed.
Runs = dict[tuple[str, int], RunLosses]


@dataclass(frozen=True)
class Setting:
    """What a comparison is about: the reference, domains, tolerance in nats per token, number of draws.

    `bigram` is the held-out loss of a bigram model on the training domains, None where nobody measured it; `waiting`
    are the architectures that have not run.
    """

    reference: str
    train: Sequence[str]
    ood: Sequence[str]
    tolerance: float
    resamples: int
    bigram: float | None = None
    waiting: Collection[str] = ()


@dataclass(frozen=True)
class Curves:
    """One run in R draws of documents: pre-training loss [R + 1, K], and loss [R + 1, K] per unseen domain."""

    x: ndarray
    y: dict[str, ndarray]


def compare_runs(
    names: Sequence[str], runs: Runs, setting: Setting, generator: np.random.Generator
) -> list[dict[str, Any]]:
    """Compare each of the architectures `names` with the reference.

    Returns:
        A row per architecture: name, verdict, words, seeds, `behind` (seeds that are not far enough to count), range of
        pre-training loss that all runs share, gap (the mean over the unseen domains), the same per domain, and along
        the range. What could not be computed is None or empty; words say why.
    """
    reference = next((run for (name, _), run in runs.items() if name == setting.reference), None)
    comparable = {key: run for key, run in runs.items() if reference is not None and run.same_documents(reference)}
    curves = _draw(comparable, setting, generator)
    rows = []
    for name in names:
        row: dict[str, Any] = {"name": name, "seeds": [], "behind": []}
        row |= {"range": None, "gap": None, "domains": [], "along": None}
        reason = _hindrance(name, runs, comparable, setting)
        if reason is None:
            seeds, behind = _counting_seeds(name, comparable, setting)
            pairs = [(curves[name, seed], curves[setting.reference, seed]) for seed in seeds]
            documents = comparable[name, seeds[0]]
            row |= {"seeds": seeds, "behind": behind} | _measure(pairs, documents, setting)
            if row["gap"]["low"] is None:
                reason = _missing_interval(documents, setting)
            elif setting.bigram is not None and row["range"][0] > setting.bigram:
                reached = f"at {row['range'][0]:.2f} nats not yet below the {setting.bigram:.2f} of a bigram model"
                reason = f"{reached}: train longer"
        judged = _judge(row, reason, setting)
        if row["behind"]:
            judged["words"] += f"; left out, for having come less than half as far: seed {_listed(row['behind'])}"
        rows.append(row | judged)
    return rows


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def held_out_loss(run: RunLosses, train: Sequence[str]) -> ndarray:
    """Return the loss per token over all held-out documents of the training domains, [K]."""
    nats = np.sum([run.domains[domain].nats.sum(0) for domain in train], axis=0)
    return nats / sum(run.domains[domain].tokens.sum() for domain in train)


def _draw(runs: Runs, setting: Setting, generator: np.random.Generator) -> dict[tuple[str, int], Curves]:
    """Draw the documents of each domain once and read off the curves of all runs."""
    if not runs:
        return {}
    ends = np.cumsum([len(run.trained) for run in runs.values()])[:-1]
    drawn = {}
    for domain in (*setting.train, *setting.ood):
        nats = np.concatenate([run.domains[domain].nats for run in runs.values()], axis=1)
        tokens = next(iter(runs.values())).domains[domain].tokens
        drawn[domain] = resample(nats, tokens, setting.resamples, generator)
    nats, tokens = (np.sum([drawn[domain][index] for domain in setting.train], axis=0) for index in (0, 1))
    x = nats / tokens[:, None]
    y = {domain: drawn[domain][0] / drawn[domain][1][:, None] for domain in setting.ood}
    columns = {domain: np.split(values, ends, axis=1) for domain, values in y.items()}
    return {
        key: Curves(x=part, y={domain: columns[domain][index] for domain in setting.ood})
        for index, (key, part) in enumerate(zip(runs, np.split(x, ends, axis=1), strict=True))
    }


def _counting_seeds(name: str, runs: Runs, setting: Setting) -> tuple[list[int], list[int]]:
    """Return the seeds that are compared, and those left out because a run of theirs is not yet far enough."""
    seen = {
        seed: min(runs[who, seed].trained.max() for who in (name, setting.reference))
        for candidate, seed in runs
        if candidate == name and (setting.reference, seed) in runs
    }
    seeds = [seed for seed in seen if seen[seed] >= LEAST_PROGRESS * max(seen.values())]
    return seeds, [seed for seed in seen if seed not in seeds]


def _overlap(*curves: ndarray) -> bool:
    """Whether curves with these pre-training losses, [K] each, have all seen some range of it."""
    return max(x.min() for x in curves) < min(x.max() for x in curves)


def _hindrance(name: str, runs: Runs, comparable: Runs, setting: Setting) -> str | None:
    """Say why there can be no gap, None when there can."""
    if not setting.ood:
        return "the study names no unseen domain"
    for who, called in ((setting.reference, f"the reference {setting.reference}"), (name, "it")):
        if who in setting.waiting:
            return f"{called} has not run yet"
        if not any(candidate == who for candidate, _ in runs):
            return f"{called} has no evaluated checkpoint with finite losses"
    if not _counting_seeds(name, runs, setting)[0]:
        return "no seed with which both it and the reference were trained"
    seeds, _ = _counting_seeds(name, comparable, setting)
    if not seeds:
        return "it was evaluated on other documents than the reference"
    pair = (name, setting.reference)
    losses = {(who, seed): held_out_loss(runs[who, seed], setting.train) for who in pair for seed in seeds}
    if _overlap(*losses.values()):
        return None
    for seed in seeds:
        if not _overlap(losses[name, seed], losses[setting.reference, seed]):
            return _apart(name, setting, runs[name, seed], runs[setting.reference, seed])
    who, seed = max(losses, key=lambda key: losses[key].min())
    lowest = losses[who, seed].min()
    return f"no shared range of pre-training loss: {who} with seed {seed} came down to {lowest:.3f} only"


def _apart(name: str, setting: Setting, run: RunLosses, reference: RunLosses) -> str:
    """Say how far two runs are from sharing a range of pre-training loss."""
    if min(len(run.trained), len(reference.trained)) < 2:
        return "a single checkpoint is not a curve: evaluate more often (train.eval_every)"
    ours, theirs = held_out_loss(run, setting.train), held_out_loss(reference, setting.train)
    behind, ahead = (name, run, ours), (setting.reference, reference, theirs)
    if theirs.min() > ours.min():
        behind, ahead = ahead, behind
    target = ahead[2].max()
    needed = tokens_to_reach(target, behind[1].trained, behind[2])
    words = (
        f"no shared range of pre-training loss: {behind[0]} came down to {behind[2].min():.3f}, "
        f"{ahead[0]} starts at {target:.3f}"
    )
    if needed is None:
        return f"{words} and the former no longer falls"
    more = float(f"{needed - behind[1].trained[-1]:.1e}")
    return f"{words}; about {more:,.0f} more tokens of {behind[0]} or earlier evaluations of {ahead[0]} would give one"


def _measure(pairs: Sequence[tuple[Curves, Curves]], documents: RunLosses, setting: Setting) -> dict[str, Any]:
    """Return range, gap, gaps per domain and the gap along the range from (run, reference) per seed."""
    places = shared_places(*(run.x for pair in pairs for run in pair))
    gaps = {
        domain: [compare(places, ours.x, ours.y[domain], theirs.x, theirs.y[domain]) for ours, theirs in pairs]
        for domain in setting.ood
    }
    nats = dict.fromkeys(setting.ood, 1.0)
    bits = {domain: _bits_per_byte(documents, domain) for domain in setting.ood}

    def over(domains: Sequence[str], unit: dict[str, float]) -> ndarray:
        return np.mean([np.stack(gaps[domain]) * unit[domain] for domain in domains], axis=0)

    def scattered(values: ndarray) -> tuple[Scatter | None, Scatter | None]:
        (ours, theirs), *more = pairs
        return (None, None) if more else scatter(places[0], values[0, 0], ours.x[0], theirs.x[0])

    def mean(domains: Sequence[str], unit: dict[str, float]) -> dict[str, Any]:
        values = over(domains, unit)
        found = interval(values.mean(-1), scattered(values)[0])
        return _numbers(found, _enough_documents(documents, setting.train, domains))

    def summary(domains: Sequence[str]) -> dict[str, Any]:
        return mean(domains, nats) | {"bits_per_byte": mean(domains, bits)}

    values = over(setting.ood, nats)
    along = interval(values, scattered(values)[1])
    middles = places[0]
    half = (middles[1] - middles[0]) / 2
    return {
        "range": [float(middles[0] - half), float(middles[-1] + half)],
        "gap": summary(setting.ood),
        "domains": [{"domain": domain} | summary([domain]) for domain in setting.ood],
        "along": {"loss": middles.tolist()} | _numbers(along, _enough_documents(documents, setting.train, setting.ood)),
    }


def _numbers(found: Interval, trusted: bool) -> dict[str, Any]:
    """Return an estimate and its interval, which is None when it cannot be trusted or computed."""
    if not trusted or np.isnan(found.low).any():
        return {"value": found.value.tolist(), "low": None, "high": None}
    return {"value": found.value.tolist(), "low": found.low.tolist(), "high": found.high.tolist()}


def _enough_documents(documents: RunLosses, train: Sequence[str], ood: Sequence[str]) -> bool:
    counts = {domain: len(found.tokens) for domain, found in documents.domains.items()}
    seen = [counts[domain] for domain in train]
    return min(seen) >= FEWEST_OF_A_DOMAIN and min(sum(seen), *(counts[domain] for domain in ood)) >= FEWEST_DOCUMENTS


def _missing_interval(documents: RunLosses, setting: Setting) -> str:
    if _enough_documents(documents, setting.train, setting.ood):
        return "too few checkpoints share a range of pre-training loss: train longer or evaluate more often"
    return (
        f"fewer than {FEWEST_DOCUMENTS} held-out documents, or than {FEWEST_OF_A_DOMAIN} of one training domain: "
        "no interval could be trusted"
    )


def _bits_per_byte(documents: RunLosses, domain: str) -> float:
    """Return how many bits per byte one nat per token is in a domain: all runs share one tokeniser."""
    found = documents.domains[domain]
    return float(found.tokens.sum() / found.bytes.sum() / math.log(2))


def _judge(row: dict[str, Any], reason: str | None, setting: Setting) -> dict[str, str]:
    """Return the verdict on a row and the words that explain it; with a `reason` it is undecided.

    An architecture keeps the capability only if it also does so at the end of the range: at the losses of early
    training all architectures are alike, and a mean over them could hide a gap that opens later. Where the end forbids
    *keeps*, the mean alone decides between the other two. A gap that opens late, surely above the tolerance at the end
    while the mean may be none, stays undecided: *degrades* speaks of the whole range, and the end is a single place,
    with one seed little more than the last checkpoint of each run. The words tell of it.
    """
    if reason is not None:
        return {"verdict": "undecided", "words": reason}
    gap, end = row["gap"], {key: row["along"][key][0] for key in ("low", "high")}
    found = verdict(gap["low"], gap["high"], end["high"], setting.tolerance)
    if found == "degrades":
        words = "worse out of domain than the reference at equal pre-training loss"
        if gap["high"] < setting.tolerance:
            words += f", a little on the whole, but {_at_the_end(end, setting.tolerance)}"
    elif found == "undecided":
        if end["low"] > setting.tolerance:
            words = f"not measurably worse on the whole, but {_at_the_end(end, setting.tolerance)}: train longer"
        elif gap["high"] < setting.tolerance:
            whole = "better" if gap["high"] < 0 else "small"
            words = f"{whole} on the whole, but {_at_the_end(end, setting.tolerance)}: train longer or use more seeds"
        else:
            words = "the interval holds both zero and the tolerance: more documents, tokens or seeds are needed"
    else:
        words = _kept(row, setting.tolerance)
    return {"verdict": found, "words": words}


def _at_the_end(end: dict[str, float], tolerance: float) -> str:
    """Say how large the gap is at the lowest shared loss, whose interval reaches the tolerance."""
    if end["low"] > tolerance:
        return f"at the lowest shared loss by {end['low']:.3f} to {end['high']:.3f}"
    return f"at the lowest shared loss the gap may reach {end['high']:.3f}"


def _kept(row: dict[str, Any], tolerance: float) -> str:
    """Say how an architecture keeps the capability, and on which domains it is worse all the same."""
    gap = row["gap"]
    if gap["high"] < 0:
        words = "better out of domain than the reference at equal pre-training loss"
    elif gap["low"] > 0:
        words = f"a little worse than the reference, by less than the tolerance of {tolerance:g}"
    else:
        words = f"any gap to the reference is below the tolerance of {tolerance:g}"
    worse = ", ".join(part["domain"] for part in row["domains"] if part["low"] is not None and part["low"] > 0)
    return f"{words}; measurably worse on {worse}" if worse else words
