"""Runs a study on the CPU in a test: texts of plugins, JSON files changed by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from basecap import plugins as loader
from basecap.analysis import analyse
from basecap.analysis.results import to_json
from basecap.data.hashes import file_digest
from basecap.records import StudyRecords
from basecap.run.execute import execute
from basecap.run.executors import Resources
from basecap.study.config import load_study, select

PLUGIN = """
import torch
from basecap.mixers import Cache, Mixer, mixer

@mixer("breaks", backbone="transformer++", paper="none", summary="gives NaN in its third step")
class Breaks(Mixer):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.calls = 0

    def forward(self, x, segments=None):
        self.calls += self.training
        return x * torch.nan if self.calls >= 3 else x

    def init_cache(self, batch, max_length):
        return Cache(tensors={})

    def step(self, x, cache):
        return x

    def flops(self, length):
        return 0.0

    def state_bytes(self, length):
        return 0
"""


STEADY = (
    PLUGIN.replace('"breaks"', '"steady"').replace("self.calls >= 3", "False")
    + """
from basecap.mixers._contract import LayerChoice, hybrid
from basecap.mixers.attention import Attention

hybrid("steady pair", layers=(LayerChoice(mixer=Attention),), backbone="gpt", paper="none", summary="of ours")
"""
)


ALONE = (
    PLUGIN.replace('"breaks"', '"alone"').replace(
        "return x * torch.nan if self.calls >= 3 else x", "return fail(self.calls, x)"
    )
    + """
import torch.distributed as dist
from basecap.evals._contract import Evaluation, Outcome, evaluation

def fail(calls, x):
    if calls == 3 and dist.get_rank() == 1:
        raise MemoryError("no room in process 1")
    return x

@evaluation("fails-once", unit="none", better="lower")
class FailsOnce(Evaluation):
    fresh = True

    def run(self, model, context):
        if FailsOnce.fresh:
            FailsOnce.fresh = False
            raise RuntimeError("this evaluation cannot")
        return Outcome(measurements=[])
"""
)


VERSES = """
from basecap.data.sources import Document, Part, Source, source

@source("study-verses")
class Verses(Source):
    def parts(self):
        return [Part("all")]

    def read(self, part):
        for domain in ("a", "b"):
            for split in ("train", "validation", "test"):
                for number in range(20):
                    yield Document(domain, split, f"{domain} {split} {number} " * 10)
"""


def run(path: Path, out: Path, settings: tuple[str, ...] = (), only: tuple[str, ...] = (), plugins=()) -> list[dict]:
    study = load_study(str(path), settings)
    said: list[str] = []
    options = {"plugins": plugins, "allow_unproved": True}  # a mixer that is not finite is not proved
    infos = execute(study, out, only=select(study, only), on=Resources(device="cpu"), log=said.append, **options)
    failures = [line for line in said if line.partition(":")[0].endswith(" failed")]
    assert len(failures) == sum(info.status == "failed" for info in infos)
    return infos


def results(out: Path) -> dict[str, Any]:
    """Write results.json; return its content without what it says of the time of a run."""
    StudyRecords(out).write_results(to_json(analyse([out])))
    found = json.loads((out / "results.json").read_text())
    for row in found["studies"][0]["runs"]:
        assert all(row.pop(name) > 0 for name in ("seconds", "tokens_per_s", "evaluating"))
    return found


def as_if_loaded_now(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a plugin count as loaded from its present file, as in another process."""
    monkeypatch.setitem(loader._loaded, f"{loader.PLUGIN}{plugin.stem}", file_digest(plugin))
