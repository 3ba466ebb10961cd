"""`train.deterministic`: the same bits twice, recorded, and refused where an operation has no such form."""

import os
from pathlib import Path

import pytest
import torch
import yaml

from basecap.errors import ConfigError
from basecap.plugins import load_plugin
from basecap.records import StudyRecords
from basecap.run.execute import execute
from basecap.run.executors import Resources
from basecap.study.config import load_study, select
from basecap.system.environment import CUBLAS_BUFFERS, CUBLAS_VARIABLE
from basecap.train.config import TrainSection
from basecap.train.deterministic import FILLS, deterministic, settings
from tests.run._execute import PLUGIN

VARIES = PLUGIN.replace('"breaks"', '"varies"').replace(
    "x * torch.nan if self.calls >= 3 else x", "x.clone().put_(torch.tensor([0]), torch.zeros(1))"
)


def test_two_runs_give_the_same_bits_and_record_what_was_set(study: dict, tmp_path: Path):
    study["train"] |= {"tokens": 512, "eval_every": 512, "deterministic": True}
    path, found = tmp_path / "tiny.yaml", []
    path.write_text(yaml.safe_dump(study | {"architectures": ["transformer++"], "seeds": [0]}))
    config = load_study(str(path))
    for out in (tmp_path / "once", tmp_path / "again"):
        (info,) = execute(config, out, only=select(config, []), on=Resources(device="cpu"), plugins=[], log=str)
        assert info.status == "finished"
        assert info.deterministic == {"torch.use_deterministic_algorithms": True, FILLS: False}
        records = StudyRecords(out).run("transformer++", 0)
        assert records.info().deterministic == info.deterministic
        found.append([(row["train_loss"], row["grad_norm"]) for row in records.metrics()])
    assert len(found[0]) > 1 and found[0] == found[1]
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_architecture_without_a_deterministic_form_is_refused_by_name(study: dict, tmp_path: Path):
    path, plugin = tmp_path / "tiny.yaml", tmp_path / "varies.py"
    plugin.write_text(VARIES)
    load_plugin(plugin)
    study["train"] |= {"tokens": 512, "eval_every": 512, "deterministic": True}
    path.write_text(yaml.safe_dump(study | {"architectures": ["transformer++", "varies"], "seeds": [0]}))
    config = load_study(str(path))
    with pytest.raises(ConfigError) as refused:
        execute(
            config, tmp_path / "out", only=select(config, []), on=Resources(device="cpu"), plugins=[plugin], log=str
        )
    assert str(refused.value) == (
        "train.deterministic: 'varies' (put_) needs an operation of which PyTorch has no deterministic form on cpu; "
        "leave it out with --only, or set train.deterministic=false and another --out."
    )


def test_the_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CUBLAS_VARIABLE, ":16:8")
    gpu, off, on = torch.device("cuda", 0), TrainSection(), TrainSection(deterministic=True)
    assert settings(off, gpu) == {}
    assert settings(on, gpu) == {
        "torch.use_deterministic_algorithms": True,
        FILLS: False,
        CUBLAS_VARIABLE: CUBLAS_BUFFERS,
        "torch._inductor.config.deterministic": True,
        "torch._dynamo.config.optimize_ddp": False,
    }
    with deterministic(off, gpu):
        assert os.environ[CUBLAS_VARIABLE] == ":16:8" and not torch.are_deterministic_algorithms_enabled()
    with deterministic(on, gpu):
        from torch._dynamo import config as tracing
        from torch._inductor import config

        assert os.environ[CUBLAS_VARIABLE] == CUBLAS_BUFFERS and torch.are_deterministic_algorithms_enabled()
        assert config.deterministic and not tracing.optimize_ddp
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert tracing.optimize_ddp and torch.utils.deterministic.fill_uninitialized_memory
    assert not (config.deterministic or torch.are_deterministic_algorithms_enabled())
