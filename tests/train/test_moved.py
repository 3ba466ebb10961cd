"""A study's directory that is moved or removed while a run trains in it: the run stops, and writes nowhere else."""

import functools
import itertools
import os
import shutil

import pytest
import torch

from basecap.errors import LostDirectory
from basecap.models.language_model import LanguageModel
from basecap.records import RunRecords, StudyRecords
from basecap.records.measured import Record
from basecap.train import checkpoint
from basecap.train.distributed import Processes
from basecap.train.loop import DevicePlacement, Trainer
from tests.train.conftest import BATCH, LENGTH, RandomStream, config

PLACEMENT = DevicePlacement.choose(torch.device("cpu"), Processes(), "fp32")


def move(out, other):
    out.rename(other)


def replace(out, other):
    out.rename(other)
    with StudyRecords(out).entered():  # another command begins there
        pass


def unlock(out, other):
    (out / "lock").unlink()


def remove(out, other):
    out.rename(other)  # all at once: a thread may be writing there
    while other.exists():
        shutil.rmtree(other, ignore_errors=True)


def train(
    model,
    records,
    *,
    at_batch=None,
    at_update=None,
    at_save=None,
    at_write=None,
    at_keep=None,
    at_evaluation=None,
    act=None,
):
    """Train a run of a study; something happens to the directory once.

    That is in a batch, an update, before a checkpoint, before the thread that writes one, while it does so and weights
    are to be kept, or in an evaluation.
    """

    class Stream(RandomStream):
        def batch(self, seed, step, *arguments, **options):
            if step == at_batch:
                act()
            return super().batch(seed, step, *arguments, **options)

    def evaluate(model, step, tokens):
        if step == at_evaluation:
            act()
        found = {"eval": "test", "subset": "all", "metric": "loss", "value": 1.0, "n": 1}
        trainer.records.append_evals([Record(step=step, tokens=tokens, **found)])

    options = config(eval_every=5 * BATCH * LENGTH)
    model = LanguageModel(model.config).initialise(0)
    trainer = Trainer(model, options, 0, workload=Stream(), records=records, placement=PLACEMENT)
    update, updates = trainer.optimiser.step, itertools.count()
    trainer.optimiser.step = lambda: (act() if next(updates) == at_update else None, update())
    layout, saved = trainer.layout, []
    save, keep, start = layout.save, layout.keep, layout._writer.start
    layout.save = lambda *given: (saved.append(given[2]), act() if given[2] == at_save else None, save(*given))
    layout.keep = lambda *given: (act() if given[2] == at_keep else None, keep(*given))
    layout._writer.start = lambda job: (act() if saved[-1:] == [at_write] else None, start(job))
    trainer.run("test", evaluate)


#: What happens when, and the step at which the run stops.
MOMENTS = [
    ({"at_batch": 8}, 8),
    ({"at_update": 7}, 8),
    ({"at_save": 10}, 10),
    ({"at_write": 20}, 20),
    ({"at_keep": 20}, 20),
    ({"at_evaluation": 10}, 10),
]
#: At each moment the directory is moved or removed; what else makes a directory another one is seen the same way.
HAPPENINGS = [(act, *at) for act in (move, remove) for at in MOMENTS]
HAPPENINGS += [(act, *at) for act in (replace, unlock) for at in MOMENTS[2:4]]


@pytest.mark.parametrize(("act", "moment", "step"), HAPPENINGS)
def test_a_run_stops_with_a_checkpoint_where_its_directory_is(model, tmp_path, act, moment, step):
    out, other = tmp_path / "out", tmp_path / "other"
    now = out if act is unlock else other
    with StudyRecords(out).entered() as study, pytest.raises(LostDirectory) as stopped:
        train(model, study.run("base", 0), **moment, act=functools.cache(lambda: act(out, other)))
    if act is remove:
        gone = f"{out} was removed or replaced while it was in use; no checkpoint can be written."
        assert str(stopped.value) == gone and list(tmp_path.iterdir()) == []
        return
    where = f"{out} was moved to {other} while it was in use; run again with --out {other}."
    if act is unlock:
        where = f"the lock of {out} was removed while it was in use; run the same command again."
    assert str(stopped.value) == f"test: stopped at step {step} of 20 with a checkpoint, as {where}"
    assert [path.name for path in out.iterdir()] == ["lock"] if act is replace else out.exists() == (act is unlock)
    found = StudyRecords(now).run("base", 0)
    assert checkpoint.latest(found.resume).name == f"step-{step}" and len(found.metrics()) == step
    train(model, found)
    train(model, RunRecords(tmp_path / "straight"))
    straight = RunRecords(tmp_path / "straight")
    assert [row["train_loss"] for row in found.metrics()] == [row["train_loss"] for row in straight.metrics()]
    assert found.evals() == straight.evals()


def test_every_write_looks_for_its_directory(tmp_path):
    with StudyRecords(tmp_path / "out").entered() as study:
        run = study.run("base", 0)
        run.append_metrics({"step": 1})
        (tmp_path / "out").rename(tmp_path / "other")
        writes = (
            lambda: run.append_metrics({"step": 2}),
            lambda: run.append_evals([]),
            lambda: run.add_unmeasured("test"),
            lambda: run.append_documents("test", 1, {}),
            lambda: run.rewind(0),
            run.flush,
            study.claimed(run).__enter__,
            study.locked().__enter__,
        )
        words = f"^{study.path} was moved to {tmp_path / 'other'} while it was in use; run again with --out"
        for write in writes:
            with pytest.raises(LostDirectory, match=words):
                write()
    assert os.listdir(tmp_path) == ["other"]
    with pytest.raises(LostDirectory):
        StudyRecords(tmp_path / "out").watch()
