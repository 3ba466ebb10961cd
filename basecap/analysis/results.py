"""The results of studies as results.json holds them: all numbers that a report shows.

These classes are the schema of that file, which docs/results.md describes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from basecap.analysis.rows import Maturity, Row
from basecap.analysis.sequential import AddedRuns, Looks
from basecap.analysis.tasks.recall_rows import AccuracyRow, ShiftRow, ShortcutRow, TrainedRow
from basecap.records.measured import Better

#: Begins the word on a leak test that did not test everything, of an architecture that has a verdict all the same.
IN_PART = "passed in part, not tested: "
#: The same of an architecture without a verdict.
UNPROVED = "is not proved to see no future, as its leak test is not complete: "


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run.

    Attributes:
        name, seed: of the run.
        use: its architecture.
        machines: what it was trained on, one after the other, as "NVIDIA H200, bf16".
        status: "running", "finished" or "failed".
        leak_test: "passed", "not run", what leaks, or `IN_PART` or `UNPROVED` and what was not tested; None for a run
            that is not finished, and for tasks.
        parameters: how many; None where unknown.
        state_bytes: size of the decoding state of one sequence of the training length, in float32; None where unknown.
        seconds: time of its steps; None without any.
        evaluating: share of its whole time that evaluation points took; None where that is not recorded.
        tokens: trained on so far.
        tokens_per_s: median over its steps; None without any.
        passes: how often it reads its training text; None for tasks, and where that was not recorded.
    """

    name: str
    seed: int
    use: str
    machines: list[str]
    status: str
    parameters: int | None
    seconds: float | None
    evaluating: float | None
    tokens: int
    tokens_per_s: float | None
    passes: float | None = None
    state_bytes: int | None
    leak_test: str | None = None


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Training loss of a run, a mean over a stretch of steps that ends after `tokens`; None where it is not finite."""

    name: str
    seed: int
    tokens: int
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class EvaluationRow:
    """One number of another evaluation, as `basecap.records.Record` with the run's name and seed.

    `unit` and `better` are None where they are those of the evaluation.
    """

    name: str
    seed: int
    step: int
    tokens: int
    eval: str
    subset: str
    metric: str
    value: float | None
    n: int
    stderr: float | None
    axis: dict[str, float]
    unit: str | None = None
    better: Better | None = None
    data: str | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerRow(EvaluationRow):
    """A share of `n` answers that are right, with Wilson's interval."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class EvaluationResults:
    """An evaluation with its declaration (`basecap.records.Declaration`): rows of each run's last checkpoint."""

    name: str
    unit: str
    better: Better
    axes: list[str]
    rows: list[EvaluationRow]

    def kind_of(self, metric: str) -> tuple[str, Better]:
        """Return unit and direction of a metric: those of its rows where they agree, else those of the evaluation."""
        kinds = {(row.unit or self.unit, row.better or self.better) for row in self.rows if row.metric == metric}
        return kinds.pop() if len(kinds) == 1 else (self.unit, self.better)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A run that failed or cannot be read, and why."""

    name: str
    seed: int
    message: str


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """The learning rates that were tried for an architecture, as `basecap.records.Sweep`.

    `at_edge` says that the chosen rate is the lowest or the highest of a sweep that did not end early.
    """

    name: str
    seed: int
    split: str
    rates: tuple[float, ...]
    losses: tuple[float | None, ...]
    chosen: float
    reached: bool
    at_edge: bool


@dataclass(frozen=True, kw_only=True)
class PointLosses:
    """The losses on one domain at an evaluation point; None where they are not finite."""

    loss: float | None
    bits_per_byte: float | None


@dataclass(frozen=True, kw_only=True)
class Point:
    """An evaluation point of a run on text: smoothed training loss, held-out loss, and the losses on each domain.

    Losses are in nats per token; None where there is none.
    """

    name: str
    seed: int
    step: int
    tokens: int
    training: float | None
    held_out: float | None
    domains: dict[str, PointLosses]

    def loss_on(self, domain: str) -> float | None:
        """Return the loss on a domain, None where it was not measured."""
        return self.domains[domain].loss if domain in self.domains else None


@dataclass(frozen=True, kw_only=True)
class ImportedRow:
    """A model that was trained elsewhere, which has no verdict.

    Attributes:
        name, use: of it.
        origin: the "folder" it came from, a hash of its "weights", and whose "tokenizer" it has, that of the "study" or
            its "own": losses per token compare with those of the study in the first case only.
        parameters: how many.
        state_bytes: size of the decoding state of one sequence of the training length, in float32.
        domains: its losses.
        evaluations: what other evaluations measured.
    """

    name: str
    use: str
    origin: dict[str, str]
    parameters: int | None
    state_bytes: int | None
    domains: dict[str, PointLosses]
    evaluations: list[EvaluationRow]


@dataclass(frozen=True, kw_only=True)
class DocumentCount:
    """The held-out documents of a domain, their predicted tokens and bytes."""

    domain: str
    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The `share` of a domain's held-out text that is in the training text too, and the documents left out for it."""

    domain: str
    share: float
    left_out: int


@dataclass(frozen=True, kw_only=True)
class TaskPoint:
    """The evaluation point of a run on a task that counts.

    Attributes:
        name, seed: of the run.
        architecture, train: of the run.
        step, tokens: of the point.
        validation: accuracy on validation examples of its own task, mean over cells; None where it was not measured.
        passed_over: whether a better point does not count, as less was measured there.
    """

    name: str
    seed: int
    architecture: str
    train: str
    step: int
    tokens: int
    validation: float | None
    passed_over: bool


@dataclass(frozen=True, kw_only=True)
class LearningPoint:
    """Accuracy of a run on validation examples of its own task at an evaluation point, mean over cells."""

    name: str
    seed: int
    step: int
    tokens: int
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """A published number with ours beside it, both shares.

    Attributes:
        architecture: an entry of the study.
        train, test: tasks; None where the number names none and the study has several.
        axis: the cell; empty for the mean over cells.
        published: the number; None where the paper has a cross, for a task that was not learned.
        value: ours.
        difference: ours minus published.
        within: whether our interval holds the published number. These three are None without one of ours, the last two
            also beside a cross.
    """

    architecture: str
    train: str | None
    test: str | None
    axis: dict[str, float]
    published: float | None
    value: float | None
    difference: float | None
    within: bool | None


@dataclass(frozen=True, kw_only=True)
class Published:
    """The published numbers of a study of tasks, and what they are shares of."""

    source: str
    metric: Literal["accuracy", "case_accuracy"]
    rows: list[PublishedRow]


@dataclass(frozen=True, kw_only=True)
class _Results:
    """What every study has.

    Attributes:
        name, summary, scale: from the study file.
        names: of its architectures, or of the runs of a study of tasks.
        reference: the architecture that the others are compared with; in a study of tasks it is only drawn in black.
        confidence: probability with which all intervals of a table hold together.
        runs, curves, evaluations, failures, sweep: rows.
        settings: study.yaml.
        environment: versions and devices.
        failed_checks: what `basecap check` finds wrong with architectures that train all the same, by name.
    """

    name: str
    summary: str
    scale: str | None
    names: list[str]
    reference: str
    confidence: float
    runs: list[RunRow]
    curves: list[CurvePoint]
    evaluations: list[EvaluationResults]
    failures: list[Failure]
    sweep: list[SweepRow]
    settings: dict[str, Any]
    environment: dict[str, Any]
    failed_checks: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class TextResults(_Results):
    """The results of a study of text.

    Attributes:
        cost: share of the reference's tokens that a gap may be worth.
        share: share of the reference's tokens after which its models count as trained; "from" in the file.
        level: of the intervals, which is smaller than 1 - confidence at each of several looks.
        looks: at a study that grows until its rows are decided, else None.
        added: runs that were added after a table had been made, None without such runs and where `looks` count them.
        resamples: draws of documents.
        train_domains, ood_domains: trained on, never seen.
        few_clusters: domains with too few clusters of documents to draw those.
        controls: architectures that are known to be worse, which shows whether the study sees a loss.
        comparisons: a row per architecture that has runs, but the reference.
        maturity: of the reference; None where nothing can be compared with it, or without an unseen domain.
        points: a row per evaluation point.
        documents: held-out documents by domain.
        overlap: held-out text that is in the training text.
        text_note: what to know of the text, None where nothing.
        imported: models that were trained elsewhere; results.json has the key where there are any.
    """

    kind: Literal["text"] = "text"
    cost: float
    share: float
    level: float
    looks: Looks | None
    added: AddedRuns | None
    resamples: int
    train_domains: list[str]
    ood_domains: list[str]
    few_clusters: list[str]
    controls: list[str]
    comparisons: list[Row]
    maturity: Maturity | None
    points: list[Point]
    documents: list[DocumentCount]
    overlap: list[Overlap]
    text_note: str | None
    imported: list[ImportedRow] = field(default_factory=list)

    @property
    def tested(self) -> list[str]:
        """The domains on which gaps are measured."""
        return self.ood_domains or self.train_domains


@dataclass(frozen=True, kw_only=True)
class TaskResults(_Results):
    """The results of a study of tasks; accuracies are shares.

    Attributes:
        architectures: entries of the study.
        train, test: tasks.
        checkpoint: "best" or "last": which evaluation point of a run counts.
        learned: accuracy on its own pattern from which on a model recalls.
        tolerated: accuracy that it may lose under a shift.
        trained, tests, shifts, shortcuts: the rows of its tables.
        published: published numbers, None without.
        waiting: runs that are not measured yet.
        points: the evaluation point of each run that counts.
        learning: accuracy on validation examples at every evaluation point.
    """

    kind: Literal["tasks"] = "tasks"
    architectures: list[str]
    train: list[str]
    test: list[str]
    checkpoint: str
    learned: float
    tolerated: float
    trained: list[TrainedRow]
    tests: list[AccuracyRow]
    shifts: list[ShiftRow]
    shortcuts: list[ShortcutRow]
    published: Published | None
    waiting: list[str]
    points: list[TaskPoint]
    learning: list[LearningPoint]


StudyResults = TextResults | TaskResults


def to_json(studies: Sequence[StudyResults]) -> dict[str, Any]:
    """Return what results.json holds of studies, for `system.files.write_json`: rows stay dataclasses."""
    names = {"share": "from"}  # in the file, where a word of Python may be a key
    return {
        "studies": [
            {names.get(key, key): value for key, value in vars(study).items() if key != "imported" or value}
            for study in studies
        ]
    }
