"""Tables as files: numbers in full, and no name that becomes a column, a tag or a command."""

import csv
from contextlib import ExitStack
from dataclasses import replace

import pytest

from basecap.analysis.rows import Estimate, GapPart
from basecap.errors import DataError
from basecap.records.token_classes import COPIED, MISLED, NEW
from basecap.report import write_live_report, write_tables
from basecap.report.export import Sheet, to_csv, to_latex, to_markdown
from tests.report.made_up import row, study, without_gap
from tests.report.synthetic import write_study

HOSTILE = r"<b>|a & b_1 \input{x}|" + "\n" + "%"


def test_each_table_of_a_study_is_written_in_three_forms(tmp_path):
    parts = (GapPart(name=COPIED, value=0.05, low=None, high=None, tokens=0.3, share=None),
             GapPart(name=MISLED, value=0.02, low=0.01, high=0.03, tokens=0.2, share=None),
             GapPart(name=NEW, value=-0.02, low=None, high=None, tokens=0.5, share=None))  # fmt: skip
    compared = (
        replace(row("a", 0.05, 0.1), parts=parts),
        row(HOSTILE, 0.2, 0.1),
        without_gap("late", "behind", "not there yet"),
    )
    written = write_tables([study(*compared)], tmp_path)
    assert sorted(path.name for path in written) == [
        f"{name}.{form}"
        for name in ("domains", "gap-parts", "gaps", "ranges", "verdicts")
        for form in ("csv", "md", "tex")
    ]
    with (tmp_path / "verdicts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [found["architecture"] for found in rows] == ["a", HOSTILE, "late"]
    assert float(rows[1]["gap"]) == 0.2 and float(rows[1]["gap low"]) == pytest.approx(0.1)
    assert rows[2]["gap"] == rows[2]["gap high"] == "" and rows[2]["why"] == "not there yet"
    with (tmp_path / "gap-parts.csv").open(newline="") as file:
        (found,) = csv.DictReader(file)
    assert (found["copied"], found["copied low"], found["misled high"]) == ("0.05", "", "0.03")
    with pytest.raises(DataError, match="--tables"):
        write_tables([study(*compared)], tmp_path / "verdicts.csv")


def test_what_a_name_holds_means_nothing_in_a_table():
    sheet = Sheet("t", ["name", "value"], [[HOSTILE, Estimate(value=0.25, low=-1.0, high=1.5)], ["b", None]])
    assert list(csv.reader(to_csv(sheet).splitlines(keepends=True)))[1] == [HOSTILE, "0.25", "-1.0", "1.5"]
    lines = to_markdown(sheet).splitlines()
    assert lines[2] == r"| &lt;b&gt;\|a &amp; b_1 \input{x}\| % | 0.250 (-1.000 … 1.500) |" and lines[3] == "| b | – |"
    latex = to_latex(sheet).splitlines()
    assert latex[3] == r"\begin{tabular}{@{}lr@{}}" and latex[8] == r"b & -- \\"
    hostile = r"\textless{}b\textgreater{}|a \& b\_1 \textbackslash{}input\{x\}| \%"
    interval = r"\begin{tabular}[t]{@{}r@{}}0.250 \\ \scriptsize ($-$1.000 \ldots{} 1.500)\end{tabular}"
    assert latex[7] == rf"{hostile} & {interval} \\"


def test_text_is_no_formula_in_a_spreadsheet():
    cells = ['=HYPERLINK("x")', "+1", "-1+2", "@SUM(A1)", "\t=1", "a-b", "", -0.5, 3]
    sheet = Sheet("t", ["=name", *map(str, range(8))], [cells])
    head, found = csv.reader(to_csv(sheet).splitlines(keepends=True))
    assert head[0] == "'=name"
    assert found == ['\'=HYPERLINK("x")', "'+1", "'-1+2", "'@SUM(A1)", "'\t=1", "a-b", "", "-0.5", "3"]


def test_printed_numbers_are_short_and_never_minus_zero():
    tiny = Estimate(value=-1e-9, low=-0.25, high=-1e-9)
    sheet = Sheet("t", ["a name of more than one line", "x"], [["top-1", tiny], ["b", 966350.04]])
    assert to_markdown(sheet).splitlines()[2:] == ["| top-1 | 0.000 (-0.250 … 0.000) |", "| b | 966350 |"]
    head, _, *body = to_latex(sheet).splitlines()[5:8]
    assert head == r"\shortstack[l]{a name of more \\ than one line} & x \\"
    assert len(body) == 1 and r"0.000 \\ \scriptsize ($-$0.250 \ldots{} 0.000)" in body[0]


def test_a_live_report_follows_a_study_to_its_end(tmp_path, monkeypatch):
    records = write_study(tmp_path, architectures={"base": (1.0, 0.0)}, documents=5, checkpoints=2, ood=["github"])
    run = records.run("base", 0)
    run.write_info(replace(run.info(), status="running"))  # and stays so: the process is killed
    pages = []
    with ExitStack() as process:
        process.enter_context(records.entered())

        def goes_on(_):
            pages.append((tmp_path / "report.html").read_text())
            run.write_info(replace(run.info(), parameters=len(pages)))
            if len(pages) == 2:
                process.close()

        monkeypatch.setattr("basecap.report.live.time.sleep", goes_on)
        said = []
        write_live_report([tmp_path], tmp_path, said.append)
    shown = (tmp_path / "report.html").read_bytes()
    with pytest.raises(DataError, match=r"none\.json cannot be read"):
        write_live_report([tmp_path], tmp_path, said.append, [tmp_path / "none.json"])
    assert (tmp_path / "report.html").read_bytes() == shown
    assert len(pages) == 2 and all('http-equiv="refresh"' in page for page in pages)
    assert 'http-equiv="refresh"' not in (tmp_path / "report.html").read_text()
    assert "still running" in said[0] and "still running" not in said[-1]
