"""Schedule wsd: decayed branches of one trunk, each the run that its budget alone would have been."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from basecap.errors import ConfigError
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords
from basecap.records.branches import BranchInfo, branch_info, branch_of, finished_branches
from basecap.train import checkpoint
from basecap.train.config import Timetable, TrainConfig
from basecap.train.distributed import Processes
from basecap.train.loop import DevicePlacement, Trainer
from tests.train.conftest import BATCH, LENGTH, config

STEP = BATCH * LENGTH
#: Budgets in steps.
FIRST, END = 12, 20


def wsd(end: int = END, branches: tuple[int, ...] = (FIRST,), **changes) -> TrainConfig:
    budgets = tuple(steps * STEP for steps in branches)
    options = {"warmup": 1, "schedule": "wsd", "decay": 0.25, "eval_every": 4 * STEP}
    return config(tokens=end * STEP, branches=budgets, **options, **changes)


class Killed(Exception):
    pass


def train(model, stream, path: Path, options: TrainConfig, fails_at: tuple[int, int] | None = None):
    """Return the records, and (step, tokens, end of the branch or 0) of each evaluation.

    `fails_at` is an evaluation that fails, as its step and the end of its branch.
    """
    placement = DevicePlacement.choose(torch.device("cpu"), Processes(), "fp32")
    records, seen = RunRecords(path), []
    trainer = Trainer(
        LanguageModel(model.config).initialise(0), options, 0, workload=stream, records=records, placement=placement
    )

    def evaluate(model: LanguageModel, step: int, tokens: int) -> None:
        branch = 0 if trainer.timetable is trainer.trunk else trainer.timetable.steps
        if (step, branch) == fails_at:
            raise Killed
        seen.append((step, tokens, branch))

    trainer.run("test", evaluate)
    return records, seen


def curve(records: RunRecords) -> list[tuple[int, float, float, float]]:
    return [(row["step"], row["train_loss"], row["grad_norm"], row["lr"]) for row in records.metrics()]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load_stored(path).state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def test_the_rate_is_constant_in_the_trunk_and_falls_in_branches():
    timetable = Timetable(wsd(final_lr=0.1), LENGTH)
    assert timetable.steps == 15 and [(branch.start, branch.steps) for branch in timetable.branches] == [
        (9, 12),
        (15, 20),
    ]
    assert [timetable.rate(step) for step in range(15)] == [0.01] * 15  # a tenth of 12 steps is one
    first = timetable.branches[0]
    assert [first.rate(step) for step in range(9, 12)] == pytest.approx([0.01, 0.007, 0.004])
    assert timetable.trained_steps == 15 + 3 + 5
    assert timetable.tokens == [step * STEP for step in (4, 8, 12, 15, 20)]
    assert timetable.evaluations == 6 and timetable.evaluations_after(0.6) == 1


def test_a_branch_is_the_run_of_its_budget_to_the_bit(model, stream, tmp_path):
    both, seen = train(model, stream, tmp_path / "both", wsd())
    assert seen == [(step, step * STEP, end) for step, end in ((4, 0), (8, 0), (12, 12), (12, 0), (15, 0), (20, 20))]
    for end in (FIRST, END):
        alone, _ = train(model, stream, tmp_path / str(end), wsd(end, ()))
        one, other = branch_of(both, end * STEP), branch_of(alone, end * STEP)
        assert curve(one) == curve(other) and len(curve(one)) == end // 4
        assert curve(alone) == curve(both)[: len(curve(alone))]
        assert same(weights(one.weights / f"step-{end}"), weights(other.weights / f"step-{end}"))
        assert not one.resume.exists()
    assert [branch_info(found) for found in finished_branches(both)] == [
        BranchInfo(tokens=12 * STEP, start=9 * STEP, status="finished"),
        BranchInfo(tokens=20 * STEP, start=15 * STEP, status="finished"),
    ]


@pytest.mark.parametrize("fails_at", [(12, 12), (12, 0), (20, 20)])
@pytest.mark.parametrize("average", [None, 0.1])
def test_a_run_that_was_killed_resumes_to_the_bit(model, stream, tmp_path, fails_at, average):
    options = wsd(checkpoint_every=STEP, average=average)
    straight, seen = train(model, stream, tmp_path / "straight", options)
    with pytest.raises(Killed):
        train(model, stream, tmp_path / "resumed", options, fails_at)
    resumed, again = train(model, stream, tmp_path / "resumed", options)
    assert again[-1] == seen[-1] and fails_at in [(step, branch) for step, _, branch in again]
    assert curve(resumed) == curve(straight)
    assert same(weights(checkpoint.latest(resumed.resume)), weights(checkpoint.latest(straight.resume)))
    for one, other in zip(finished_branches(resumed), finished_branches(straight), strict=True):
        assert curve(one) == curve(other)
        (path,) = one.weights.iterdir()
        assert same(weights(path), weights(other.weights / path.name))


def test_a_finished_run_goes_on_to_more_tokens(model, stream, tmp_path):
    straight, _ = train(model, stream, tmp_path / "straight", wsd())
    train(model, stream, tmp_path / "longer", wsd(FIRST, ()))
    longer, seen = train(model, stream, tmp_path / "longer", wsd())
    assert seen[-1] == (END, END * STEP, END) and (FIRST, FIRST * STEP, FIRST) not in seen
    assert curve(longer) == curve(straight)
    assert [curve(found) for found in finished_branches(longer)] == [
        curve(found) for found in finished_branches(straight)
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"branches": (2**20,)}, r"train\.branches has 1048576, more than train\.tokens = 1280; lower it, or raise"),
        ({"branches": (0,)}, "below 1 token"),
        ({"schedule": "cosine"}, r"train\.branches needs train\.schedule = wsd; set that, or remove"),
        ({"schedule": "cosine", "branches": ()}, r"train\.decay needs train\.schedule = wsd; set that, or remove"),
        ({"stop_at": 0.9}, "remove train.epochs and train.stop_at"),
    ],
)
def test_branches_that_do_not_fit_are_refused(changes, words):
    with pytest.raises((ConfigError, ValidationError), match=words):
        TrainConfig.model_validate(wsd().model_dump() | changes)
