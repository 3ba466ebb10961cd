"""The tables of a report as files: CSV with plain numbers, Markdown and LaTeX as people print them."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from basecap.files import replacing, safe_name
from basecap.report.rows import at_lowest

Study = dict[str, Any]


@dataclass(frozen=True)
class Sheet:
    """A table: a cell is text, a number, None, or an interval {"value", "low", "high"}."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def write_tables(studies: Sequence[Study], out: Path) -> list[Path]:
    """Write each table of studies into the directory `out`, three files each; returns their paths.

    Raises:
        DataError: there is no room, or `out` is no directory.
    """
    paths = []
    for index, study in enumerate(studies, start=1):
        prefix = f"{index}-" if len(studies) > 1 else ""
        for sheet in sheets(study):
            for suffix, write in FORMS.items():
                path = out / f"{prefix}{safe_name(sheet.name)}.{suffix}"
                with replacing(path, "another directory with --tables") as file:
                    file.write(write(sheet).encode())
                paths.append(path)
    return paths


def sheets(study: Study) -> Iterator[Sheet]:
    """Yield the tables of a study that have rows."""
    own = _text(study) if study["kind"] == "text" else _tasks(study)
    for sheet in (*own, *_common(study)):
        if sheet.rows:
            yield sheet


def _text(study: Study) -> Iterator[Sheet]:
    columns = [
        "architecture", "verdict", "gap", "as if trained on", "why", "verdict alone", "gap alone",
        "gap at lowest shared loss", "weighted gap", "bits per byte", "tolerance", "range from", "range to", "runs",
        "reference runs",
    ]  # fmt: skip
    rows = []
    for row in study["comparisons"]:
        gap, ends = row["gap"] or {}, row["range"] or (None, None)
        found = [row["name"], row["verdict"], row["gap"], gap.get("tokens"), row["words"]]
        found += [gap.get("alone"), gap.get("single"), at_lowest(row), row["weighted"]]
        found += [gap.get("bits_per_byte"), gap.get("tolerance"), *ends]
        rows.append([*found, len(row["seeds"]), len(row["reference_seeds"])])
    yield Sheet("verdicts", columns, rows)
    by_domain = [
        [row["name"], part["domain"], part["verdict"], part, part["tokens"], part["bits_per_byte"], part["tolerance"]]
        for row in study["comparisons"]
        for part in row["domains"]
    ]
    heads = ["architecture", "domain", "verdict", "gap", "as if trained on", "bits per byte", "tolerance"]
    yield Sheet("domains", heads, by_domain)
    domains = [*study["train_domains"], *study["ood_domains"]]
    points = [
        [*(point[key] for key in ("name", "seed", "step", "tokens", "training", "held_out"))]
        + [point["domains"].get(domain, {}).get("loss") for domain in domains]
        for point in study["points"]
    ]
    heads = ["architecture", "seed", "step", "tokens", "training loss", "held-out loss", *domains]
    yield Sheet("evaluation-points", heads, points)
    yield _columns("documents", study["documents"], ("domain", "documents", "tokens", "bytes"))


def _tasks(study: Study) -> Iterator[Sheet]:
    yield _columns("accuracy", study["tests"], ("architecture", "train", "test", "accuracy", "case_accuracy"))
    yield _columns("shifts", study["shifts"], ("architecture", "train", "test", "cells", "index", "verdict"))
    yield _columns("shortcuts", study["shortcuts"], ("architecture", "shifts", "index"))
    cells = [
        {**row, **cell, "cell": ", ".join(f"{axis} {value:g}" for axis, value in cell["axis"].items())}
        for row in study["tests"]
        for cell in row["cells"]
    ]
    heads = ("architecture", "train", "test", "cell", "accuracy", "case_accuracy", "examples")
    yield _columns("cells", cells, heads)


def _common(study: Study) -> Iterator[Sheet]:
    keys = ("name", "seed", "status", "parameters", "tokens", "tokens_per_s", "seconds")
    yield _columns("runs", study["runs"], keys)
    rates = [
        {"architecture": swept["name"], "rate": rate, "loss": loss, "chosen": "yes" if rate == swept["chosen"] else ""}
        for swept in study["sweep"]
        for rate, loss in zip(swept["rates"], swept["losses"], strict=True)
    ]
    yield _columns("learning-rates", rates, ("architecture", "rate", "loss", "chosen"))
    for found in study["evaluations"]:
        rows = [row | row["axis"] for row in found["rows"]]
        heads = ("name", "seed", "subset", *found["axes"], "metric", "value", "stderr", "n")
        yield _columns(f"evaluation-{found['name']}", rows, heads)


def _columns(name: str, rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> Sheet:
    return Sheet(name, [key.replace("_", " ") for key in keys], [[row[key] for key in keys] for row in rows])


def to_csv(sheet: Sheet) -> str:
    """Return a table as CSV (RFC 4180): numbers in full, an interval in three columns, nothing where there is none."""
    wide = [any(isinstance(row[place], dict) for row in sheet.rows) for place in range(len(sheet.columns))]
    heads = [
        [name, f"{name} low", f"{name} high"] if split else [name]
        for name, split in zip(sheet.columns, wide, strict=True)
    ]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([head for some in heads for head in some])
    for row in sheet.rows:
        cells = [
            [(cell or {}).get(key) for key in ("value", "low", "high")] if split else [cell]
            for cell, split in zip(row, wide, strict=True)
        ]
        writer.writerow([cell for some in cells for cell in some])
    return text.getvalue()


def to_markdown(sheet: Sheet) -> str:
    """Return a table as Markdown that GitHub shows; a name cannot become a tag or another column."""

    def safe(text: str) -> str:
        for mark, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("\n", " "), ("\r", " ")):
            text = text.replace(mark, entity)
        return text

    lines = [sheet.columns, ["---"] * len(sheet.columns), *([_printed(cell) for cell in row] for row in sheet.rows)]
    return "".join(f"| {' | '.join(safe(cell) for cell in line)} |\n" for line in lines)


#: What means something in LaTeX -> what prints it.
IN_LATEX = {mark: f"\\{mark}" for mark in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "…": r"\ldots{}", "–": "--",
    "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def to_latex(sheet: Sheet) -> str:
    """Return a table as a LaTeX tabular that needs no package."""
    numbers = [all(not isinstance(row[place], str) for row in sheet.rows) for place in range(len(sheet.columns))]
    lines = [sheet.columns, *([_printed(cell) for cell in row] for row in sheet.rows)]
    head, *body = [
        " & ".join("".join(IN_LATEX.get(mark, mark) for mark in " ".join(cell.split())) for cell in line) + r" \\"
        for line in lines
    ]
    places = "".join("r" if number else "l" for number in numbers)
    return "\n".join(
        [rf"\begin{{tabular}}{{{places}}}", r"\hline", head, r"\hline", *body, r"\hline", r"\end{tabular}", ""]
    )


def _printed(cell: Any) -> str:
    if isinstance(cell, dict):
        ends = "" if cell["low"] is None else f" ({cell['low']:.3f} … {cell['high']:.3f})"
        return f"{cell['value']:.3f}{ends}"
    if cell is None:
        return "–"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


#: Suffix of a file -> what makes its text.
FORMS: dict[str, Callable[[Sheet], str]] = {"csv": to_csv, "md": to_markdown, "tex": to_latex}
