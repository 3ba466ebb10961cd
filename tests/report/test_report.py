"""The report: one safe file that needs no network, whatever the study looks like."""

import base64
import hashlib
import io
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from rich.console import Console

from basecap.analysis import StudyResults, analyse
from basecap.errors import ConfigError, DataError
from basecap.records import StudyRecords, Sweep
from basecap.report import terminal_table, write_report
from basecap.report.bundle import _made, bundle
from basecap.report.palette import looks
from basecap.system.files import read_json
from tests.report.synthetic import write_study

TWO = {"base": (1.0, 0.0), "other": (1.0, 0.2)}
EVIL = "<script>alert('evil')</script>"


class Page(HTMLParser):
    """The tags of a page, its visible text, and how many scripts run."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.hidden = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.hidden = tag in ("script", "style")

    def handle_endtag(self, tag):
        self.hidden = False

    def handle_data(self, data):
        self.text += "" if self.hidden else data

    @property
    def asked_for(self) -> list[str]:
        """What the page would fetch: anything but a place in itself."""
        found = [attributes.get(key) for _, attributes in self.tags for key in ("src", "href", "action", "data")]
        ids = {f"#{attributes['id']}" for _, attributes in self.tags if "id" in attributes}
        return [address for address in found if address is not None and address not in ids]

    @property
    def charts(self) -> list[str]:
        return [attributes["data-name"] for tag, attributes in self.tags if tag == "div" and "data-name" in attributes]


#: The charts of gaps over all domains.
GAPS = {"gaps", "gap-along-training", "gap-over-tokens"}


def printed(studies: Sequence[StudyResults], paths: Sequence[Path], width: int = 160) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(terminal_table(studies, paths))
    return out.getvalue()


def test_one_offline_page_with_every_part(tmp_path):
    architectures = {**TWO, "same": (1.0, 0.0)}  # the gap lies in copied tokens
    write_study(tmp_path, architectures=architectures, documents=60, seeds=(0, 1), more_evaluations=True)
    path = write_report([tmp_path], tmp_path).page
    page = Page(path)
    assert path == tmp_path / "report.html" and path.stat().st_size < 5e6
    assert page.asked_for == [], "the page must not ask for anything"
    policy = next(attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes)
    rules = {words[0]: words[1:] for words in map(str.split, policy.split(";"))}
    scripts = re.findall(r"<script(?: data-bundle=[^>]*)?>(.*?)</script>", path.read_bytes().decode(), re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert rules["script-src"] == [*(f"'sha256-{found}'" for found in hashes), "'unsafe-eval'"] and len(hashes) == 2
    assert {
        "gaps",
        "gap-along-training",
        "gap-over-tokens",
        "gap-parts",
        "training",
        "gaps-github",
        "scatter-github-enlarged",
        "scatter-github",
        "scatter-github-training-loss",
        "few-shot-acc",
        "passkey-accuracy-niah",
        "gap-against-selection",
        "audit-untrained_selection",
    } <= set(page.charts)
    for words in (
        "Verdicts",
        "degrades",
        "keeps",
        "less than 10 % of the tokens",
        "2.13.0",
        "seq_len",
        "stackexchange",
        "How architectures read the past",
        "degrades, and can only partly select: 0.58 of 1",
        "copies less: tokens that a copy from the context predicts contribute",
    ):
        assert words in page.text
    assert sum(tag == "tr" for tag, _ in page.tags) > 30
    assert not (tmp_path / "figures").exists()


def test_names_from_outside_are_text_everywhere(tmp_path):
    records = write_study(tmp_path, architectures={"base": (1.0, 0.0), EVIL: (1.0, 0.1)}, ood=[EVIL], documents=40)
    run = records.run(EVIL, 0)
    run.write_info(replace(run.info(), status="failed", message=f"{EVIL} [bold]broke[/bold]"))
    report = write_report([tmp_path], tmp_path, images="svg")
    path, page = report.page, Page(report.page)
    assert "<script>alert" not in path.read_text()
    assert page.text.count(EVIL) > 5
    assert len([tag for tag, _ in page.tags if tag == "script"]) == len(page.charts) + 2
    files = sorted((tmp_path / "figures").iterdir())
    assert sorted(report.figures) == files and sorted(file.stem for file in files) == sorted(page.charts)
    for file in files:
        assert re.fullmatch(r"[\w+,=.-]+\.svg", file.name)
        assert not [node for node in ElementTree.parse(file).iter() if node.tag.endswith("script")]
    assert f"{EVIL} [bold]broke[/bold]" in printed(report.studies, [tmp_path], width=400)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"architectures": {"base": (1.0, 0.0)}}, "nothing to compare"),
        ({"seeds": ()}, "Not trained: base and "),
        ({"checkpoints": 3}, "train.eval_every"),
        ({"documents": 1}, "no interval can be trusted"),
        ({"documents": 1, "ood": []}, "no interval can be trusted"),
        ({"architectures": {"base": (1.0, 0.0), "slow": (0.02, 0.0)}}, "slow is behind."),
    ],
    ids=["one run", "nothing yet", "few points", "one document", "no unseen domain", "one is behind"],
)
def test_poor_studies_still_make_a_page(tmp_path, options, said):
    write_study(tmp_path, **{"architectures": TWO, "documents": 40, "ood": ["github"]} | options)
    report = write_report([tmp_path], tmp_path)
    page, text, (study,) = Page(report.page), printed(report.studies, [tmp_path]), report.studies
    legend = [attributes["data-name"] for tag, attributes in page.tags if tag == "button" and "data-name" in attributes]
    assert legend == [name for name in study.names if name in {point.name for point in study.points}]
    allowed = {"undecided", "behind", "none"} if study.ood_domains else {"none"}
    assert {row.verdict for row in study.comparisons} <= allowed
    assert text.startswith("limited-mini\n")  # no table of dashes
    assert "limited-mini" in page.text and said in page.text and said in text
    assert not re.search(r"\bnan\b", page.text, re.IGNORECASE)


def test_records_without_classes_of_tokens_have_no_parts(tmp_path):
    write_study(tmp_path, architectures=TWO, documents=40, ood=["github"], classes=False)
    report = write_report([tmp_path], tmp_path)
    page, (row,) = Page(report.page), report.studies[0].comparisons
    assert row.gap is not None and row.parts == () and "Where the gap comes from" not in page.text
    assert set(page.charts) >= GAPS and "gap-parts" not in page.charts


def test_learning_rates_copied_text_and_proofs_are_shown_where_they_are_known(tmp_path):
    records = write_study(tmp_path, architectures=TWO, documents=5, ood=["github"])
    swept = Sweep(name="base", seed=0, split="s", rates=(0.003, 0.001), losses=(None, 3.125), chosen=0.001)
    records.write_sweeps([swept])
    overlap = [{"domain": "github", "share": 0.123, "left_out": 7}]
    proof = {"layers": 3, "covered": ["32 tokens, fp32"], "unproved": ["64 tokens: over"], "seconds": 0.8}
    records.write_environment({**records.environment(), "overlap": overlap, "proofs": {"mine": proof}})
    run = next(found for found in records.runs() if found.info().name == "base")
    run.write_info(replace(run.info(), seconds={"steps": 8.0, "evaluations": 6.1, "all": 10.0}))
    text = re.sub(r"\s+", " ", Page(write_report([tmp_path], tmp_path).page).text)
    assert re.search(r"base ?3\.125 ?diverged", text) and re.search(r"12\.3 % ?7", text)
    assert re.search(r"share of evaluation ?points in all time", text) and "61 %" in text
    assert re.search(r"mine ?3 ?32 tokens, fp32 ?64 tokens: over ?0\.8 s", text)
    assert "a better one may be outside" in text and "training text: 7 of github" in text


def test_a_record_of_another_metric_is_no_loss(tmp_path):
    run = write_study(tmp_path, architectures=TWO, documents=40, ood=["github"]).run("other", 0)
    path = run.path / "evals.jsonl"
    path.write_text(path.read_text().replace('"metric": "loss"', '"metric": "other"'))
    assert "other" in Page(write_report([tmp_path], tmp_path).page).text


def test_several_studies_in_one_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # short names: a title is not broken
    paths = [Path("one"), Path("two")]
    for path in paths:
        write_study(path, architectures=TWO, documents=40, seeds=(0, 1), ood=["github"])
    report = write_report(paths, tmp_path / "both")
    page, text = Page(report.page), printed(report.studies, paths, 300)
    assert sum(tag == "h1" for tag, _ in page.tags) == 3 and "Which should I use?" in page.text
    for path in paths:  # the studies have one name
        assert f"limited-mini ({path})" in page.text and f"limited-mini ({path}): gap" in text
    assert {"1-gaps", "2-gaps"} <= set(page.charts) and len(set(page.charts)) == len(page.charts)
    assert "too few runs" not in page.text
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(DataError, match=r"loop/study\.yaml cannot be read"):
        write_report([tmp_path / "loop"], tmp_path / "loop")
    with pytest.raises(ConfigError, match="one is given twice; give each directory once"):
        write_report([*paths, tmp_path / "one"], tmp_path / "both")


def test_a_mixed_study_shows_differences_without_verdicts(tmp_path):
    write_study(tmp_path, architectures=TWO, documents=40, seeds=(0, 1), train=["c4"], ood=[])
    report = write_report([tmp_path], tmp_path)
    page, text = Page(report.page), printed(report.studies, [tmp_path], 400)
    for said in ("Differences at equal training loss", "so there is no verdict", "The same over the held-out loss"):
        assert said in page.text
    assert not [attributes for _, attributes in page.tags if "badge" in attributes.get("class", "")]
    assert {
        "gaps",
        "gap-along-training",
        "gap-over-tokens",
        "scatter-c4-enlarged",
        "scatter-c4",
        "scatter-c4-held-out-loss",
    } <= set(page.charts)
    assert re.search(r"other +[+-]0\.\d{3} ", text) and "so there is no verdict" in text


@pytest.mark.parametrize(
    ("ood", "needed"), [(None, "gaps do not need it"), ([], "gaps at equal training loss need it")]
)
def test_a_page_without_training_logs_says_what_is_missing(tmp_path, ood, needed):
    options = {} if ood is None else {"ood": ood}
    records = write_study(tmp_path, architectures=TWO, documents=60, seeds=(0, 1), **options)
    (whole,) = write_report([tmp_path], tmp_path).studies
    for run in records.runs():
        (run.path / "metrics.jsonl").unlink()
    report = write_report([tmp_path], tmp_path)
    page, (study,) = Page(report.page), report.studies
    assert f"(metrics.jsonl) of all runs is missing, and with it training loss, speed and time; {needed}." in page.text
    assert [row.gap for row in study.comparisons] == [row.gap if ood is None else None for row in whole.comparisons]
    assert [(run.tokens, run.seconds) for run in study.runs] == [(run.tokens, None) for run in whole.runs]
    assert "training" not in page.charts and "smoothed training loss" not in page.text


def test_results_are_not_replaced_when_the_records_of_their_runs_are_gone(tmp_path):
    copy, other, empty = (
        write_study(tmp_path / name, architectures=TWO, seeds=()) for name in ("copy", "other", "empty")
    )
    write_study(other.path, architectures=TWO, documents=5, checkpoints=2)
    results = {"studies": [{"points": [{"step": 1}]}]}
    for records in (copy, other):
        records.write_results(results)
    said = r"results\.json has results of runs that are not in .*; restore the runs, remove results\.json or give"
    for studies, out, error, words in (
        ([copy], copy, DataError, said),
        ([copy, other], copy, ConfigError, "copy holds a study, whose own report this would replace; give another"),
        ([other], copy, ConfigError, "copy holds a study"),
        ([empty], other, ConfigError, "other holds a study"),
    ):
        with pytest.raises(error, match=words):
            write_report([study.path for study in studies], out.path)
        assert read_json(out.path / "results.json") == results
    with pytest.raises(DataError, match=said):
        copy.refuse_lost_results()
    (copy.path / "runs").mkdir()  # they were removed to be trained again
    for records in (copy, other, empty, StudyRecords(tmp_path / "new")):
        assert not records.refuse_lost_results()
    other.refuse_lost_results(replaced_by=results)
    other.write_results({"studies": [{"points": [1], "documents": [1]}]})
    with pytest.raises(DataError, match=said):  # checkpoints alone, without the losses of documents, give no verdict
        other.refuse_lost_results(replaced_by=results)
    for run in other.runs():
        shutil.rmtree(run.path / "documents")
    with pytest.raises(DataError, match=r"not in .*other \(.*lacks the losses at step .* to train it again\); restore"):
        write_report([other.path], other.path)


@pytest.mark.parametrize(
    ("documents", "pictures"), [(60, {"gaps", "gap-along-training", "gap-over-tokens"}), (5, set())]
)
def test_only_charts_that_are_there_are_described(tmp_path, documents, pictures):
    write_study(tmp_path, architectures=TWO, documents=documents, ood=["github"])
    page = Page(write_report([tmp_path], tmp_path).page)
    assert GAPS & set(page.charts) == pictures
    assert ("Thin bar:" in page.text) == ("the gap at each loss" in page.text) == bool(pictures)
    assert ("Tolerance" in page.text) == ("By domain" in page.text) == bool(pictures)


def test_terminal_table(tmp_path):
    architectures = {**TWO, "same": (1.0, 0.0), "slow": (0.02, 0.0)}
    write_study(tmp_path, architectures=architectures, documents=60, seeds=(0, 1, 2))
    text = printed(analyse([tmp_path]), [tmp_path])
    found = r"other +degrades +\+0\.\d{3} +\+0\.\d{3} … \+0\.\d{3} +\d+ % \(\d+ … \d+ %\) +\+0\.\d{3} ✗ +3 / 3 "
    assert re.search(found, text) and re.search(r"slow +behind +–( +–)+", text)
    for said in ("same keeps the capability", "- slow: its held-out loss ends at"):
        assert said in text
    assert max(map(len, text.splitlines())) <= 160


def test_one_seed_gives_a_verdict_on_these_trained_models(tmp_path):
    write_study(tmp_path, architectures=TWO, documents=40, ood=["github"])
    report = write_report([tmp_path], tmp_path)
    for text in (Page(report.page).text, printed(report.studies, [tmp_path], 400)):
        assert "too few runs to estimate" in text and "these trained models only" in text and "degrades" in text


def test_scripts_come_from_an_earlier_page_unless_it_is_damaged(tmp_path, monkeypatch):
    write_study(tmp_path, architectures=TWO, documents=5, checkpoints=2)
    page = write_report([tmp_path], tmp_path).page.read_bytes()
    made = []
    monkeypatch.setattr("basecap.report.bundle._made", lambda: made.append(1) or "draw('é<\\/script>');")
    assert bundle(page).encode() in page and not made
    assert write_report([tmp_path], tmp_path).page.read_bytes() == page and not made
    for other in (b"", page.replace(b"const n", b"const m", 1), page.replace(b"vega-lite 6", b"vega-lite 5", 1)):
        assert bundle(other) == "draw('é<\\/script>');"
    assert len(made) == 3


@pytest.mark.parametrize("lacks", ["the library", "its version of Vega-Lite"])
def test_a_report_without_what_draws_charts_says_so(lacks, tmp_path, monkeypatch):
    write_study(tmp_path, architectures=TWO, documents=5, checkpoints=2)
    old = SimpleNamespace(javascript_bundle=Mock(side_effect=ValueError("no such version")))
    monkeypatch.setitem(sys.modules, "vl_convert", None if lacks == "the library" else old)
    monkeypatch.setattr("basecap.report.bundle._made", _made.__wrapped__)
    report = write_report([tmp_path], tmp_path)
    remedy = "pip install vl-convert-python" if lacks == "the library" else "install another release"
    assert report.without_charts.startswith("charts need ") and report.without_charts.endswith(f"; {remedy}.")
    page = Page(report.page)
    assert page.charts == [] and [tag for tag, _ in page.tags].count("script") == 1
    assert f"This report has no charts: {report.without_charts}" in page.text and "Verdicts" in page.text
    assert (tmp_path / "results.json").is_file()
    if lacks == "the library":
        with pytest.raises(ConfigError, match="pip install vl-convert-python"):
            write_report([tmp_path], tmp_path, images="svg")
    monkeypatch.undo()
    assert Page(write_report([tmp_path], tmp_path).page).charts


def test_lines_are_dashed_where_colours_come_again():
    names = [f"architecture {number}" for number in range(13)]
    found = looks(names, names[0])
    assert len({(look.colour, look.dash) for look in found}) == len({(look.colour, look.mark) for look in found}) == 13
    assert len({look.colour for look in found}) < len(names)
