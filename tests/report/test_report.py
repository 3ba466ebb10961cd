"""The report: one safe file that needs no network, whatever the study looks like."""

import io
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from basecap.errors import DataError
from basecap.records import StudyRecords
from basecap.report import terminal_table, write_report
from basecap.report.palette import architecture_scales, dash_scale
from basecap.report.words import duration, headline, single_seed, unfinished
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
    def charts(self) -> list[str]:
        return [attributes["data-name"] for _, attributes in self.tags if "data-name" in attributes]


def printed(records: StudyRecords, width: int = 160) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(terminal_table(records.results(), [records.path]))
    return out.getvalue()


def test_one_offline_page_with_every_part(tmp_path):
    records = write_study(tmp_path, documents=60, checkpoints=5, more_evaluations=True)
    path = write_report([tmp_path], tmp_path)
    page = Page(path)
    assert path == tmp_path / "report.html" and path.stat().st_size < 5e6
    assert not [attributes for _, attributes in page.tags if {"src", "href", "action", "data"} & set(attributes)], (
        "the page must not ask for anything"
    )
    policy = next(attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'")
    assert {
        "gaps",
        "gap-along-training",
        "training",
        "scatter-github",
        "scatter-github-training-loss",
        "few-shot-acc",
        "passkey-accuracy-niah",
    } <= set(page.charts)
    for words in (
        "Verdicts",
        "degrades",
        "keeps",
        "0.02 nats",
        "There is one seed",
        "2.13.0",
        "seq_len",
        "stackexchange",
    ):
        assert words in page.text
    assert sum(tag == "tr" for tag, _ in page.tags) > 30
    assert StudyRecords(tmp_path).results()["studies"][0]["name"] == records.study()["name"]


def test_figures_are_svg_beside_the_page(tmp_path):
    write_study(tmp_path, architectures=TWO, documents=40, checkpoints=3, ood=["github"])
    page = Page(write_report([tmp_path], tmp_path / "elsewhere"))
    files = sorted((tmp_path / "elsewhere" / "figures").iterdir())
    assert sorted(file.stem for file in files) == sorted(page.charts)
    for file in files:
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
    assert "other" in (tmp_path / "elsewhere" / "figures" / "scatter-github.svg").read_text()


def test_names_from_outside_are_text_everywhere(tmp_path):
    records = write_study(tmp_path, architectures={"base": (1.0, 0.0), EVIL: (1.0, 0.1)}, ood=[EVIL], documents=40)
    run = records.run(EVIL, 0)
    run.write_info({**run.info(), "status": "failed", "message": f"{EVIL} [bold]broke[/bold]"})
    path = write_report([tmp_path], tmp_path)
    page = Page(path)
    assert "<script>alert" not in path.read_text()
    assert page.text.count(EVIL) > 5
    assert len([tag for tag, _ in page.tags if tag == "script"]) == len(page.charts) + 2
    for file in (tmp_path / "figures").iterdir():
        assert not [node for node in ElementTree.parse(file).iter() if node.tag.endswith("script")]
        assert re.fullmatch(r"[\w+,=.-]+\.svg", file.name)
    assert f"{EVIL} [bold]broke[/bold]" in printed(records, width=400)


@pytest.mark.parametrize(
    "options",
    [
        {"architectures": {"base": (1.0, 0.0)}},
        {"seeds": ()},
        {"checkpoints": 1},
        {"documents": 1},
        {"ood": []},
        {"architectures": {"base": (1.0, 0.0), "slow": (0.02, 0.0)}},
    ],
    ids=["one run", "nothing yet", "one checkpoint", "one document", "no unseen domain", "no shared range"],
)
def test_poor_studies_still_make_a_page(tmp_path, options):
    records = write_study(tmp_path, **{"architectures": TWO, "documents": 40, "checkpoints": 4} | options)
    page = Page(write_report([tmp_path], tmp_path))
    assert "limited-mini" in page.text and "limited-mini" in printed(records)
    compared = len(options.get("architectures", TWO)) - 1
    assert page.text.count("undecided") >= compared * 2
    assert not re.search(r"\bnan\b", page.text, re.IGNORECASE)


def test_a_record_of_another_metric_is_no_loss(tmp_path):
    run = write_study(tmp_path, architectures=TWO, documents=40).run("other", 0)
    path = run.path / "evals.jsonl"
    path.write_text(path.read_text().replace('"metric": "loss"', '"metric": "other"'))
    assert "other" in Page(write_report([tmp_path], tmp_path)).text


def test_several_studies_in_one_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # short names: a title is not broken
    paths = [Path("one"), Path("two")]
    for path in paths:
        write_study(path, architectures=TWO, documents=40, checkpoints=2, seeds=(0, 1))
    page = Page(write_report(paths, tmp_path / "both"))
    assert sum(tag == "h1" for tag, _ in page.tags) == 2
    out = io.StringIO()
    Console(width=300, file=out).print(terminal_table(StudyRecords(tmp_path / "both").results(), paths))
    for path in paths:  # the studies have one name
        assert f"limited-mini ({path})" in page.text and f"limited-mini ({path}): gap" in out.getvalue()
    assert {"1-gaps", "2-gaps"} <= set(page.charts) and len(set(page.charts)) == len(page.charts)
    assert "There is one seed" not in page.text


def test_results_are_not_replaced_when_the_records_of_their_runs_are_gone(tmp_path):
    copy, other, empty = (write_study(tmp_path / name, seeds=()) for name in ("copy", "other", "empty"))
    write_study(other.path, architectures=TWO, documents=5, checkpoints=2)
    results = {"studies": [{"points": [{"step": 1}]}]}
    for records in (copy, other):
        records.write_results(results)
    said = r"results\.json has results that no records here give; restore runs, remove it or use another --out"
    for studies, out in (([copy], copy), ([copy, other], copy), ([other], copy), ([empty], other)):
        with pytest.raises(DataError, match=said):
            write_report([study.path for study in studies], out.path)
        assert out.results() == results
    with pytest.raises(DataError, match=said):
        copy.refuse_loss()
    (copy.path / "runs").mkdir()  # they were removed to be trained again
    for records in (copy, other, empty, StudyRecords(tmp_path / "new")):
        assert not records.refuse_loss()
    other.refuse_loss(replaced_by=results)
    other.write_results({"studies": [{"points": [1], "documents": [1]}]})
    with pytest.raises(DataError, match=said):  # checkpoints alone, without the losses of documents, give no verdict
        other.refuse_loss(replaced_by=results)


@pytest.mark.parametrize(("documents", "charts"), [(60, 2), (5, 1)])
def test_only_charts_that_are_there_are_described(tmp_path, documents, charts):
    write_study(tmp_path, architectures=TWO, documents=documents, checkpoints=4)
    page = Page(write_report([tmp_path], tmp_path))
    assert sum(name in ("gaps", "gap-along-training") for name in page.charts) == charts
    assert ("Second: the mean" in page.text) == (charts == 2)
    assert ("its band the interval at each place" in page.text) == (charts == 2)


def test_terminal_table(tmp_path):
    records = write_study(tmp_path, architectures={**TWO, "slow": (0.02, 0.0)}, documents=60)
    write_report([tmp_path], tmp_path)
    text = printed(records)
    assert re.search(r"other +degrades +\+0\.\d{4} +\+0\.\d{4} … \+0\.\d{4}", text)
    assert re.search(r"slow +undecided +– +–", text) and "slow: no shared range" in text
    assert "against base: other degrades; slow is undecided." in text


def test_words():
    rows = [{"name": name, "verdict": "keeps"} for name in ("a", "b")]
    assert headline({"reference": "r", "comparisons": rows}).endswith("against r: a, b keep it.")
    assert headline({"reference": "r", "comparisons": []}) == "There is nothing to compare with r."
    assert [duration(seconds) for seconds in (None, 48, 130, 7500)] == ["–", "48 s", "2 min", "2 h 05 min"]


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ({"a": [0], "b": [1]}, "There is one seed: intervals and verdicts speak of these trained models"),
        ({"a": [0], "b": [0, 1]}, "There is one seed (a): intervals"),
        ({"a": [0], "b": []}, "There is one seed (a): intervals"),
        ({"a": [0, 1], "b": [0, 1, 2]}, ""),
        ({}, ""),
    ],
)
def test_what_a_single_seed_cannot_tell_is_said(seeds, words):
    rows = [{"name": name, "seeds": found, "gap": {} if found else None} for name, found in seeds.items()]
    for asked, advice in (([0], " with --set 'seeds=[0,1,2]' as well"), ([0, 1, 2], " to finish those of the")):
        said = single_seed({"comparisons": rows, "settings": {"seeds": asked}})
        assert said.startswith(words) and bool(said) == bool(words)
        assert not said or f"run the same command again{advice}" in said


def test_a_second_seed_that_has_not_run_leaves_one(tmp_path):
    records = write_study(tmp_path, architectures=TWO, documents=40, seeds=(0, 1))
    page = Page(write_report([tmp_path], tmp_path))
    assert "There is one seed" not in page.text + printed(records)
    (records.run("other", 1).path / "run.json").unlink()
    page = Page(write_report([tmp_path], tmp_path))
    assert "There is one seed" in page.text and "There is one seed" in printed(records)


def test_runs_that_are_not_at_their_end_are_named():
    done = {"name": "a", "seed": 0, "status": "finished", "tokens": 60_000_000}
    half = {"name": "b", "seed": 1, "status": "running", "tokens": 30_081_024}
    assert unfinished({"runs": [done]}) == ""
    assert "b (seed 1) at 30.1M tokens" in unfinished({"runs": [done, half]})
    assert "a (seed 0)" not in unfinished({"runs": [done, half]})


def test_lines_are_dashed_where_colours_come_again():
    names = [f"architecture {number}" for number in range(13)]
    colours = architecture_scales(names, names[0])[0].range
    looks = list(zip(colours, map(tuple, dash_scale(names, names[0]).range), strict=True))
    assert len(set(looks)) == len(names)
    assert len(set(colours)) < len(names)
