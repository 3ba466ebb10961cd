"""Published numbers of a study. They belong to the published size, so a report of another scale leaves them out."""

from basecap.analysis.results import Published, StudyResults, TaskResults, TextResults
from basecap.analysis.study_files import Figure
from basecap.names import PAPER


def published_figure(study: TextResults) -> Figure | None:
    """Return the figure of the paper that a study reproduces, without published numbers at another scale."""
    found = study.settings.get("figure")
    figure = Figure.model_validate(found) if found else None
    return figure if figure is None or _of_its_size(study) else figure.model_copy(update={"published": None})


def published_numbers(study: TaskResults) -> Published | None:
    """Return published numbers beside ours, None at another scale."""
    return study.published if _of_its_size(study) else None


def left_out_text(study: StudyResults) -> str:
    """Return a sentence on published numbers that are left out, "" where there are none."""
    if _of_its_size(study) or (source := _source(study)) is None:
        return ""
    return f"The numbers of {source} belong to the published size, so they are not shown at scale {study.scale}."


def _of_its_size(study: StudyResults) -> bool:
    return study.scale in (None, PAPER)


def _source(study: StudyResults) -> str | None:
    if isinstance(study, TaskResults):
        return study.published.source if study.published else None
    figure = study.settings.get("figure") or {}
    return (figure.get("published") or {}).get("source")
