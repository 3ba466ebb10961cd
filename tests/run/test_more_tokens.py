"""A finished study is continued to more tokens, and a study of decayed branches is analysed at their ends."""

from pathlib import Path

import pytest

from basecap.analysis.text.text_study import analyse_text
from basecap.errors import ConfigError
from basecap.plan.checks import check
from basecap.plan.estimate import estimate
from basecap.records import StudyRecords
from basecap.records.branches import finished_branches
from basecap.run.executors import Resources
from basecap.run.stored_weights import evaluate_directory
from basecap.run.trained import load_trained, stored_weights
from basecap.study.config import load_study
from tests.run._execute import run

#: A step has 256 tokens.
WSD = ("train.schedule=wsd", "train.eval_every=512", "train.branches=[1280]", "train.decay=0.4")
FEW = "evals=[domain-loss]"
SHORT, LONG = "train.tokens=2560", "train.tokens=5120"


def curves(out: Path) -> dict[str, list[tuple[int, float]]]:
    runs = [part for found in StudyRecords(out).runs() for part in (found, *finished_branches(found))]
    return {
        str(part.path.relative_to(out)): [(row["step"], row["train_loss"]) for row in part.metrics()] for part in runs
    }


@pytest.mark.parametrize(
    "settings",
    [
        ("train.schedule=wsd", "train.eval_every=1280", "train.branches=[1280]", "train.decay=0.4", FEW),
        ("train.schedule=constant", "train.eval_every=2560", FEW),
    ],
)
def test_more_tokens_continue_the_runs_of_a_finished_study(study_file, tmp_path, settings):
    longer = (*settings, LONG, *(("train.branches=[1280, 2560]",) if "train.decay=0.4" in settings else ()))
    run(study_file, tmp_path / "straight", longer)
    run(study_file, tmp_path / "out", (*settings, SHORT), only=("transformer++",))
    infos = run(study_file, tmp_path / "out", (*settings, LONG))  # held branches stay, and the former end is one
    assert {info.status for info in infos} == {"finished"}
    assert curves(tmp_path / "out") == curves(tmp_path / "straight")
    before = curves(tmp_path / "out")
    run(study_file, tmp_path / "out", (*settings, LONG))
    assert curves(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ((SHORT, FEW), (LONG, FEW), r"has train\.tokens = 2560, on which the schedule linear depends; train anew"),
        (("train.schedule=constant", LONG, FEW), ("train.schedule=constant", SHORT, FEW), "holds another study"),
        (
            (*WSD, SHORT),
            (*WSD, LONG, "train.branches=[1280, 1536]"),
            r"has 1536, before the end of \S+ at 2560 tokens; branches can be added beyond it",
        ),
        (
            ("train.schedule=constant", SHORT, "train.warmup=5"),
            ("train.schedule=constant", LONG, "train.warmup=5"),
            "cannot be continued from 2560 to 5120 tokens, as its warm-up of 1 steps depends on them; give another",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(study_file, tmp_path, first, then, words):
    run(study_file, tmp_path / "out", first, only=("transformer++",))
    held = (tmp_path / "out" / "study.yaml").read_bytes()
    with pytest.raises(ConfigError, match=words):
        run(study_file, tmp_path / "out", then)
    assert (tmp_path / "out" / "study.yaml").read_bytes() == held


def test_a_gap_is_measured_between_branches(study_file, tmp_path):
    settings = (*WSD, SHORT, "evals=[domain-loss, {copying: {at: end}}]")
    study = load_study(str(study_file), settings)
    assert {row["steps"] for row in estimate(check(study), tmp_path)} == {6 + 2 + 4}
    run(study_file, tmp_path / "out", settings)
    results = analyse_text(StudyRecords(tmp_path / "out"))
    assert {(point.step, point.tokens) for point in results.points} == {(5, 1280), (10, 2560)}
    for found in StudyRecords(tmp_path / "out").runs():
        assert {record.eval for record in found.evals()} == {"domain-loss"}
        assert {record.step for record in found.evals()} == {2, 4, 6}
        assert [{record.eval for record in part.evals()} for part in finished_branches(found)] == [
            {"domain-loss", "copying"}
        ] * 2
        assert load_trained(found.path, device="cpu").step == 10 and {5, 10} <= stored_weights(found).keys()
    said: list[str] = []
    options = {"only": ("transformer++",), "on": Resources(device="cpu"), "plugins": (), "log": said.append}
    assert evaluate_directory(tmp_path / "out", add=("position-loss: {first: 8, at: end}",), at=None, **options) == 0
    assert said == ["position-loss ran on the weights of 2 evaluation points; the report has its numbers."]
