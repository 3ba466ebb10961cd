"""A study of text in words: its question, verdicts, reasons and cautions; and how numbers are written."""

from collections.abc import Iterable, Mapping, Sequence

from basecap.analysis.results import IN_PART, StudyResults, SweepRow, TextResults
from basecap.analysis.rows import Estimate, Gap, Row, grouped
from basecap.analysis.text.draws import FEWEST_DOCUMENTS, countable
from basecap.analysis.text.reasons import REFERENCE, alike, undecided
from basecap.report.maturity_text import rising_text
from basecap.report.table_rows import measured_on
from basecap.system.progress import duration

#: Verdict -> verb for one architecture and for several.
VERBS = {
    "keeps": ("keeps the capability", "keep the capability"),
    "degrades": ("degrades", "degrade"),
    "undecided": ("is undecided", "are undecided"),
    "early": ("is too early to judge", "are too early to judge"),
    "maturity unknown": ("has no verdict, as maturity is unknown", "have no verdict, as maturity is unknown"),
    "behind": ("is behind", "are behind"),
}
#: Verdict -> the sign before it on its badge.
SIGNS = {
    "keeps": "✓",
    "degrades": "✗",
    "undecided": "?",
    "early": "↻",
    "maturity unknown": "?",
    "behind": "…",
    "none": "·",
}
#: What a gap of models that are too young means.
YOUNG = (
    "Until the reference has learned to copy from its context, a gap says who is ahead at this age, not what an "
    "architecture keeps: so no row has a verdict."
)
#: A caution about a sweep.
EDGE = "The best learning rate is the lowest or the highest that was tried"
#: More architectures than these are counted in the headline where one thing is said of all of them.
MANY = 3
#: Larger shares of tokens are not written as a number.
LARGEST_SHARE = 10


def question(study: TextResults) -> str:
    """Return two sentences: the question of a study, and its architectures."""
    reference, trained = study.reference, listed(study.train_domains)
    others = len(study.comparisons) or len(study.names) - 1
    of = "1 architecture and compares it" if others == 1 else f"{others} architectures and compares them"
    if study.ood_domains:
        unseen = listed(study.ood_domains)
        return (
            f"Once two models predict unseen text of {trained} equally well, do they also predict {unseen}, which they "
            f"never saw, equally well? This study tests {of} with {reference}, the reference for base capability."
        )
    return (
        f"Once two models predict their training text equally well, do they predict unseen text of {trained} equally "
        f"well too? This study tests {of} with {reference}."
    )


def headline(study: TextResults) -> str:
    """Return the findings of a study in a sentence or two."""
    reference = study.reference
    if not study.comparisons:
        return f"There is nothing to compare with {reference}."
    if unfit := _unfit(study):
        return f"Nothing can be compared with {reference} yet, as {unfit}."
    found = {verdict: [row.name for row in study.comparisons if row.verdict == verdict] for verdict in VERBS}
    parts = [
        f"{_all_or_listed(study, names)} {VERBS[verdict][len(names) > 1]}" for verdict, names in found.items() if names
    ]
    if study.ood_domains and not parts:
        return f"There is nothing to compare with {reference}."
    if study.ood_domains:
        return f"Out of domain at equal pre-training loss, compared with {reference}: {'; '.join(parts)}."
    higher, lower, same = _sides(study)
    equal = [row.name for row in study.comparisons if row.name in same and row.gap is not None and alike(row.gap)]
    same = [name for name in same if name not in equal]
    without = [row.name for row in study.comparisons if row.gap is None and row.verdict == "none"]
    parts = [
        *([f"{listed(higher)} {'have' if len(higher) > 1 else 'has'} a higher held-out loss"] if higher else []),
        *([f"{listed(lower)} {'have' if len(lower) > 1 else 'has'} a lower held-out loss"] if lower else []),
        *([f"{_all_or_listed(study, equal)} {'are' if len(equal) > 1 else 'is'} alike"] if equal else []),
        *([f"{listed(same)} {'show' if len(same) > 1 else 'shows'} no measurable difference"] if same else []),
        *([f"{listed(without)} {'are' if len(without) > 1 else 'is'} not compared"] if without else []),
        *parts,
    ]
    text = f"Compared with {reference} at equal training loss: {'; '.join(parts)}. " if parts else ""
    return f"{text}This study trains on every domain that it tests, so there is no verdict."


def _sides(study: TextResults) -> tuple[list[str], list[str], list[str]]:
    """Return the architectures whose gap is measurably above 0, below 0, and neither."""
    gaps = {row.name: row.gap for row in study.comparisons if row.gap is not None}
    higher = [name for name, gap in gaps.items() if gap.low > 0]
    lower = [name for name, gap in gaps.items() if gap.high < 0]
    return higher, lower, [name for name in gaps if name not in (*higher, *lower)]


def _at_this_age(study: TextResults) -> str:
    """Return what gaps say of models that are too young for verdicts, " " before it; "" without a gap."""
    worse, better, same = _sides(study)
    parts = [
        *([f"{listed(better)} {'are' if len(better) > 1 else 'is'} better out of domain"] if better else []),
        *([f"{listed(worse)} {'are' if len(worse) > 1 else 'is'} worse out of domain"] if worse else []),
        *([f"{listed(same)} {'show' if len(same) > 1 else 'shows'} no measurable difference"] if same else []),
    ]
    return f" Compared with {study.reference} at this age, {'; '.join(parts)}." if parts else ""


def _all_or_listed(study: TextResults, names: Sequence[str]) -> str:
    """Return names, or that they are all there are of many."""
    count = len(names)
    return f"all {count} architectures" if count > MANY and count == len(study.comparisons) else listed(names)


def _unfit(study: TextResults) -> str | None:
    """Return why nothing can be compared with the reference, None where something can: it is not fit for it."""
    unfit = (row.words for row in study.comparisons if row.gap is None and row.words.startswith(f"{REFERENCE} "))
    return next(unfit, None)


def reasons(study: TextResults) -> list[str]:
    """Return why rows have no decision and what would give one, a sentence or two for rows of one reason.

    What the headline says of all rows is not repeated.
    """
    unfit = _unfit(study)
    without = [
        row
        for row in sorted(study.comparisons, key=lambda row: row.verdict == "behind")
        if row.words != unfit and (row.verdict in ("undecided", "early", "behind") or row.gap is None)
    ]
    maturity = study.maturity
    if maturity is None or maturity.state == "mature":
        whole = []
    else:
        # One sentence for the whole table: what helps the reference helps every row.
        state = "Too early" if maturity.state == "early" else "Maturity unknown"
        whole = [f"{state}: {maturity.words}. {YOUNG}{_at_this_age(study)}"]
        without = [row for row in without if row.gap is None and row.verdict != "early"]
    return [
        *whole,
        *(
            f"{listed([row.name for row in rows])}: {reason}.{_remedy(rows, study.reference)}"
            for reason, rows in grouped(without, _reason).items()
        ),
    ]


def _reason(row: Row) -> str:
    found = row.gap
    if found is None or row.verdict == "early":
        return row.words
    return undecided(found) if found.tolerance is not None else f"{undecided(found)}, so no gap can be judged"


def _remedy(rows: Sequence[Row], reference: str) -> str:
    """Return what would decide rows that share a reason, " " before it."""
    rows = [row for row in rows if row.verdict == "undecided" and row.gap is not None and row.gap.tolerance is not None]
    if not rows:
        return ""
    if any(row.conditional for row in rows):
        return " Train at least three seeds."
    needed = sorted(((row.name, row.more) for row in rows if row.more is not None), key=lambda pair: pair[1].runs)
    never = [row.name for row in rows if row.more is None]
    text = ""
    if needed:
        counts = ", ".join(f"{more.runs} for {name}{_in_brackets(more.seconds)}" for name, more in needed)
        text = f" More runs of each and of {reference} have an even chance to decide: {counts}."
    if never:
        text += f" More runs alone will not decide {listed(never)}: use more held-out documents or train longer."
    return text


def _in_brackets(seconds: float | None) -> str:
    return "" if seconds is None else f" ({duration(seconds)} of training)"


def trained_models_only(study: TextResults) -> str:
    """Return two sentences about intervals that include no variation from run to run, "" when there are none."""
    if not any(row.conditional for row in study.comparisons):
        return ""
    return (
        "There are too few runs to estimate how much a result varies from seed to seed: intervals and verdicts hold "
        f"for these trained models only, not for the architectures. {_more_seeds(study)}."
    )


def _more_seeds(study: TextResults) -> str:
    """Return how a study gets more seeds: with --until-decided no more than its looks are planned for."""
    if (looks := study.looks) is None:
        return "Train at least three seeds: run the same command again with --set 'seeds=[0,1,2]'"
    if looks.looks[-1] < looks.most:
        return f"Train more seeds: run the same command again, with --until-decided --max-seeds {looks.most}"
    return f"Train more seeds: run the same command with another --out and more than --max-seeds {looks.most}"


def single_run_caution(study: TextResults) -> str:
    """Return a sentence about rows of one run, whose variation from run to run is taken from others, "" for none."""
    names = [row.name for row in study.comparisons if row.gap and len(row.seeds) == 1 and not row.conditional]
    if not names:
        return ""
    have, they = ("has", "it varies") if len(names) == 1 else ("have", "they vary")
    return (
        f"{listed(names)} {have} one run: how much {they} from seed to seed is taken from the other runs of this "
        "study, and intervals allow for what architectures were measured to differ by. Only a second run measures it."
    )


def added_after_a_table(study: TextResults) -> str:
    """Return two sentences about runs that were added after a table of the study had been made, "" for none."""
    if (added := study.added) is None:
        return ""
    named = [f"{name} {', '.join(map(str, seeds))}" for name, seeds in added.runs.items()]
    return (
        f"Added by hand or after a table had been made: seeds of {'; '.join(named)}. Where what was seen led to that, "
        f"the intervals hold with at least {100 * added.confidence:g} % instead of {100 * study.confidence:g} %: plan "
        "all seeds before, or use --until-decided."
    )


def remarks(study: TextResults) -> list[str]:
    """Return a sentence for each unusual thing about a study's runs, text and learning rates."""
    left_out = [f"{row.left_out:,} of {row.domain}" for row in study.overlap if row.left_out]
    copied = "Held-out documents left out because they are in the training text"
    return [
        *([rising_text(study)] if rising_text(study) else []),
        *checks_text(study.failed_checks),
        *_not_leak_tested(study),
        *_left_out(study),
        *([f"{study.text_note}."] if study.text_note else []),
        *_not_counted(study),
        *([f"{copied}: {listed(left_out)}."] if left_out else []),
        *edge_text(study.sweep),
        *mixed_data_text(study),
    ]


def checks_text(failed: Mapping[str, str]) -> list[str]:
    """Return a sentence on each architecture that fails checks but trains."""
    return [f"{name} {fault}." for name, fault in failed.items()]


def _not_leak_tested(study: TextResults) -> list[str]:
    """Return sentences on finished runs without a whole leak test, such as those of earlier versions."""
    names = dict.fromkeys(run.name for run in study.runs if run.leak_test == "not run")
    sentences = [f"Leak test of the trained models not run: {listed(names)}."] if names else []
    for run in study.runs:
        if run.leak_test is not None and run.leak_test.startswith(IN_PART):
            missing = run.leak_test.removeprefix(IN_PART)
            sentences.append(f"Leak test of {run.name} (seed {run.seed}) not complete: {missing}.")
    return sentences


def _not_counted(study: TextResults) -> list[str]:
    """Return a sentence on the tested domains that gaps leave out, if any."""
    counts = {found.domain: found.documents for found in study.documents if found.domain in study.tested}
    few = [f"{name} ({count})" for name, count in counts.items() if name not in countable(counts)]
    if not few or all(row.gap is None for row in study.comparisons):
        return []
    return [f"Too few held-out documents to measure a gap on {listed(few)}: an interval needs {FEWEST_DOCUMENTS}."]


def edge_text(sweeps: Sequence[SweepRow]) -> list[str]:
    """Return a sentence on the architectures whose best learning rate was the first or last, if any."""
    names = [sweep.name for sweep in sweeps if sweep.at_edge]
    whom = "every architecture" if len(names) == len(sweeps) > 1 else listed(names) if names else ""
    return [f"{EDGE} for {whom}: a better one may be outside the range."] if names else []


def mixed_data_text(study: StudyResults) -> list[str]:
    """Return a sentence on the evaluations that runs measured on different data, if there are any."""
    places = [(row.evaluation, row.subset) for row in measured_on(study)]
    mixed = [
        f"{subset} of {evaluation}"
        for evaluation, subset in dict.fromkeys(places)
        if places.count((evaluation, subset)) > 1
    ]
    if not mixed:
        return []
    return [f'Not measured on the same data in all runs, see "How it was run": {listed(mixed)}.']


def rates_text(sweeps: Sequence[SweepRow], held_out: str) -> str:
    """Return the learning rates that sweeps have chosen on `held_out`, "" where there was none."""
    names: dict[float, list[str]] = {}
    for sweep in sorted(sweeps, key=lambda sweep: sweep.chosen):
        names.setdefault(sweep.chosen, []).append(sweep.name)
    chosen = [f"{rate:g} for {listed(own)}" for rate, own in names.items()]
    return f"Learning rates, chosen on {held_out}: {'; '.join(chosen)}." if chosen else ""


def _left_out(study: TextResults) -> list[str]:
    """Return a sentence about finished runs that are not compared, none when there are none."""
    running = {(run.name, run.seed) for run in study.runs if run.status == "running"}
    rows, reference = [row for row in study.comparisons if row.gap is not None], study.reference
    every = [(reference, run) for row in rows[:1] for run in row.reference_left_out]
    every += [(row.name, run) for row in rows for run in row.left_out]
    named = [f"{name} seed {run.seed} ({run.why})" for name, run in every if (name, run.seed) not in running]
    if not named:
        return []
    text = f"Left out of the comparison: {'; '.join(named)}."
    if rows[0].reference_left_out:
        count = len(rows[0].reference_seeds)
        text += f" {count} {'run' if count == 1 else 'runs'} of {reference} {'is' if count == 1 else 'are'} compared."
    return [text]


def unfinished(study: TextResults) -> str:
    """Return one or two sentences about unfinished runs, "" when there are none."""
    running = [run for run in study.runs if run.status == "running"]
    if not running:
        return ""
    rows = [row for row in study.comparisons if row.gap is not None]
    compared = {(row.name, seed) for row in rows for seed in row.seeds}
    compared |= {(study.reference, seed) for row in rows for seed in row.reference_seeds}
    groups = {True: "compared at their latest evaluation points", False: "not compared"}
    parts = []
    for inside, words in groups.items():
        some = [run for run in running if ((run.name, run.seed) in compared) == inside]
        named = ", ".join(f"{run.name} (seed {run.seed}) at {run.tokens:,} tokens" for run in some)
        parts += [f"{words}: {named}"] if some else []
    return f"Not finished, {'; '.join(parts)}. Run the same command again, with its --set and --only, to resume."


def listed(names: Iterable[str]) -> str:
    """Return names as "a, b and c".

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    *some, last = names
    return f"{', '.join(some)} and {last}" if some else last


def gap_text(gap: Estimate | None) -> str:
    """Return a gap as "+0.004", a dash when there is none."""
    return "–" if gap is None else _signed(gap.value)


def interval_text(gap: Estimate | None) -> str:
    """Return a gap's interval as "-0.001 … +0.009", a dash when there is none: a place along the curve may lack it."""
    return "–" if gap is None or gap.low is None or gap.high is None else f"{_signed(gap.low)} … {_signed(gap.high)}"


def _signed(value: float) -> str:
    return f"{round(value, 3) + 0.0:+.3f}"  # never "-0.000"


def share_text(value: float | None) -> str:
    """Return a share of tokens as "83 %", a dash when there is none.

    >>> share_text(0.834), share_text(0.002), share_text(31.0)
    ('83 %', '< 1 %', '> 1,000 %')
    """
    if value is None:
        return "–"
    if value > LARGEST_SHARE:
        return f"> {LARGEST_SHARE * 100:,} %"
    return "< 1 %" if value < 0.01 else f"{100 * value:.0f} %"


def worth_text(gap: Gap | None) -> str:
    """Return after which share of its tokens the reference is as good, as "83 %"."""
    return "–" if gap is None or gap.tokens is None else share_text(gap.tokens.value)


def worth_interval_text(gap: Gap | None) -> str:
    """Return the interval of that share as "70 … 99 %"."""
    if gap is None or gap.tokens is None:
        return "–"
    low, high = (share_text(end) for end in (gap.tokens.low, gap.tokens.high))
    return f"{low.removesuffix(' %')} … {high}"


def runs_text(row: Row) -> str:
    """Return the runs that were compared, its own and the reference's, as "3 / 10"."""
    return f"{len(row.seeds)} / {len(row.reference_seeds)}" if row.seeds else "–"


def duration_text(seconds: float | None) -> str:
    """Return a duration, a dash when unknown."""
    return "–" if seconds is None else duration(seconds)


def size_text(size: float | None) -> str:
    """Return bytes in their largest binary unit, a dash when unknown.

    >>> size_text(16_609_591_296), size_text(41472), size_text(640)
    ('15.5 GiB', '40.5 KiB', '640 B')
    """
    if size is None:
        return "–"
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.3g} {unit}"
    return f"{size:g} B"
