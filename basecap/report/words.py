"""Numbers and verdicts as people read them."""

from typing import Any

#: Verdict -> how it is said of one architecture and of several.
VERBS = {
    "keeps": ("keeps it", "keep it"),
    "degrades": ("degrades", "degrade"),
    "undecided": ("is undecided", "are undecided"),
}


def headline(study: dict[str, Any]) -> str:
    """Return one sentence that sums a study up."""
    parts = []
    for verdict, verbs in VERBS.items():
        names = [row["name"] for row in study["comparisons"] if row["verdict"] == verdict]
        if names:
            parts.append(f"{', '.join(names)} {verbs[len(names) > 1]}")
    if not parts:
        return f"There is nothing to compare with {study['reference']}."
    return f"Base capability at equal pre-training loss, against {study['reference']}: {'; '.join(parts)}."


def unfinished(study: dict[str, Any]) -> str:
    """Return one sentence about the runs that are not at their end, "" when there are none."""
    running = [run for run in study["runs"] if run["status"] == "running"]
    if not running:
        return ""
    named = ", ".join(f"{run['name']} (seed {run['seed']}) at {run['tokens'] / 1e6:.1f}M tokens" for run in running)
    return f"Not finished, and compared by what there is: {named}. Run the study again to resume."


def single_seed(study: dict[str, Any]) -> str:
    """Return two sentences about the gaps measured with one seed, "" when there are none.

    From a single pair of runs nobody can tell what another seed would change, so no interval holds it. Simulated
    studies say what that costs: where seeds move the gap by 0.02 nats, 40 to 66 % of the intervals are true, not 95 %.
    """
    names = [row["name"] for row in study["comparisons"] if row["gap"] is not None and len(row["seeds"]) == 1]
    if not names:
        return ""
    who = "" if len(names) == len(study["comparisons"]) else f" ({', '.join(names)})"
    asked = len(study["settings"]["seeds"]) >= 3
    more = "" if asked else " with --set 'seeds=[0,1,2]' as well, which adds them"
    return (
        f"There is one seed{who}: intervals and verdicts speak of these trained models, not yet of the architectures. "
        "They do not hold how far another seed would move the gap; only more seeds can show that, three at least: "
        f"run the same command again{more or ' to finish those of the study'}."
    )


def gap_text(gap: dict[str, Any] | None) -> str:
    """Return a gap as "+0.0040", a dash when there is none."""
    return "–" if gap is None else f"{gap['value']:+.4f}"


def interval_text(gap: dict[str, Any] | None) -> str:
    """Return a gap's interval as "-0.0010 … +0.0090", a dash when there is none."""
    return "–" if gap is None or gap["low"] is None else f"{gap['low']:+.4f} … {gap['high']:+.4f}"


def duration(seconds: float | None) -> str:
    """Return seconds as "2 h 05 min" or "48 s", a dash when unknown."""
    if seconds is None:
        return "–"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min" if seconds >= 120 else f"{seconds:.0f} s"
