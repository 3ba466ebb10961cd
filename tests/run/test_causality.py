"""No architecture of a plugin trains that sees the future."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from basecap.errors import ConfigError
from basecap.mixers import Cache, Mixer, mixer
from basecap.plan.runs import RunSpec, plan_runs
from basecap.plugins import load_plugin
from basecap.run.proofs import refuse_leaks
from basecap.study.config import StudyConfig
from tests.run._execute import PLUGIN, run

FUTURE = "sees the future: outputs before position"
PACKED = "mixes packed documents or sees the future in them: outputs of a document"
STATE = "keeps state from one pass to the next: outputs for the same input change when it is read again .by "
ONLY = "sees the future in {} mode only: outputs before position"

#: Name of a mixer -> what its forward returns, the tokens of a sequence, and what is said of it.
FORWARDS = {
    "proof fine": ("self.out(means(x, segments))", 32, None),
    "proof ahead": ("self.out(x.roll(-1, 1))", 32, f"{FUTURE} 10 change with later inputs .* in float64"),
    "proof mean": ("self.out(x - x.mean(1, keepdim=True))", 32, FUTURE),
    "proof blocks": (
        "x.unflatten(1, (-1, 256)).mean(2, keepdim=True).expand(-1, -1, 256, -1).flatten(1, 2)",
        1024,
        FUTURE,
    ),
    "proof edge": ("x + x.roll(-1, 1) * (torch.arange(x.shape[1]) == 19)[:, None]", 64, f"{FUTURE} 20 .*19 of 64"),
    "proof late": ("torch.cat([x[:, :1024], x.roll(-1, 1)[:, 1024:]], 1)", 1400, f"{FUTURE} 1399 .* --length 1400"),
    "proof boundary": (
        "x + x.roll(1, 1) * (torch.arange(x.shape[1]) == 100)[:, None]",
        128,
        f"{PACKED} change with others, or with its own later inputs .first at position 100 of 128",
    ),
    "proof training": ("x + 1e-3 * x.roll(-1, 1) if self.training else x", 32, ONLY.format("training")),
    "proof statistics": (
        "torch.nn.functional.batch_norm(x.mT, x.new_zeros(16), x.new_ones(16), training=self.training).mT",
        32,
        "mixes the sequences of a batch in training mode only: outputs of one change with the inputs of another",
    ),
    "proof batch": ("x - x.mean(0, keepdim=True)", 32, "mixes the sequences of a batch: outputs of one .* in float64"),
    "proof evaluation": ("x if self.training else x + 1e-3 * x.roll(-1, 1)", 32, ONLY.format("evaluation")),
    "proof documents": ("self.out(means(x, None))", 32, f"{PACKED} change with others"),
    "proof backward": ("Backward.apply(x)", 32, f"{FUTURE} 10 have gradients with respect to later inputs"),
    "proof packed backward": (
        "x if segments is None else Backward.apply(x)",
        32,
        f"{PACKED} have gradients with respect to others",
    ),
    "proof packed ahead": (
        "x if segments is None else x + 1e-3 * x.roll(-1, 1) * (segments == segments.roll(-1, 1))[..., None]",
        32,
        PACKED,
    ),
    "proof boundaries": (
        "x if segments is None else x + (segments != segments.roll(-1, 1))[..., None]",
        32,
        PACKED,
    ),
    "proof faint": ("means(x, segments) + 1e-6 * x.roll(-1, 1)", 32, FUTURE),
    "proof faint single": ("(x + 1e-6 * x.roll(-1, 1)).float().to(x.dtype)", 32, FUTURE),
    "proof kernel": ("fails_in_double(x).roll(-1, 1)", 32, f"{FUTURE} .* in float32"),
    "proof lower": ("x + 1e-3 * x.roll(-1, 1) * torch.is_autocast_enabled(x.device.type)", 32, None),
    "proof random": ("x * torch.rand_like(x)", 32, None),
    "proof own random": ("x * torch.rand(x.shape, generator=GENERATOR)", 32, "gives two outputs for one input"),
    "proof counts": ("counted(self, x)", 32, f"{STATE}.* of their size, in float64"),
    "proof averages": ("averaged(self, x)", 32, STATE),
    "proof single": ("means(x.float(), segments).to(x.dtype)", 32, None),
    "proof fourier": ("fourier(x) if segments is None else x", 256, None),
    "proof chunks": ("x.unflatten(1, (-1, 32)).cumsum(2).flatten(1, 2) if segments is None else 1 / 0", 96, None),
    "proof equal": ("equal(x)", 32, FUTURE),
    "proof deeper": ("x.roll(-1, 1) if self.layer.index >= 2 else x", 32, FUTURE),
    "proof many": ("x.roll(-1, 1) if len(x) > 8 else x", 32, FUTURE),
    "proof few": ("fails_in_small_batches(x).roll(-1, 1)", 32, FUTURE),
}
#: The same of mixers that can be neither refused nor proved.
UNPROVED = {
    "proof small": ("fails_in_small_batches(x)", 32, "32 tokens, 1 row, repeated inputs, float32: ValueError: too few"),
    "proof whole": ("x.unflatten(1, (-1, 48)).cumsum(2).flatten(1, 2) if segments is None else 1 / 0", 96, "64 tokens"),
    "proof infinite": ("x / 0", 32, "32 tokens, 9 rows, normal inputs, float32: ArithmeticError: its outputs are not"),
    "proof narrow": ("x[..., :1]", 32, "mixer Breaks"),
}
FORWARDS |= UNPROVED
PARTS = """
GENERATOR = torch.Generator()

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + 1e-3 * grad.roll(1, 1)

def fails_in_double(x):
    if x.dtype == torch.float64:
        raise TypeError("no kernel for double precision")
    return x

def fails_in_small_batches(x):
    if len(x) < 8:
        raise ValueError("too few")
    return x

def counted(mixer, x):
    mixer.calls = getattr(mixer, "calls", 0) + 1
    return x + 1e-4 * mixer.calls

def averaged(mixer, x):
    # as a batch norm, but of the passes before this one
    mean = getattr(mixer, "mean", 0)
    mixer.mean = mean + 0.5 * (x.detach().mean() - mean)
    return x - mean

def equal(x):
    # each position gets what follows the later ones with the same input
    key = (x.detach().double() * torch.arange(1, x.shape[-1] + 1)).sum(-1)
    same = (key[:, :, None] == key[:, None]).to(x.dtype)
    return x + same.triu(1) @ x.roll(-1, 1) / x.shape[1]

def means(x, segments):
    keep = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
    if segments is not None:
        keep = keep * (segments[:, :, None] == segments[:, None, :])
    return (keep / keep.sum(-1, keepdim=True)) @ x

def fourier(x):
    length = x.shape[1]
    decay = (-0.02 * torch.arange(length)[:, None] * torch.arange(1, x.shape[2] + 1)).exp()
    parts = [torch.fft.rfft(part.float(), n=2 * length, dim=-2) for part in (x, decay)]
    return torch.fft.irfft(parts[0] * parts[1], n=2 * length, dim=1)[:, :length].to(x.dtype)
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("proofs") / "proofs.py"
    out = "self.out = torch.nn.Linear(layer.hidden, layer.hidden, bias=False)\n        "
    code = PLUGIN.replace("self.calls = 0", out + "torch.nn.init.zeros_(self.out.weight)")
    mixers = [
        code.replace('"breaks"', f'"{name}"')
        .replace("self.calls += self.training\n", "\n")
        .replace("x * torch.nan if self.calls >= 3 else x", forward)
        for name, (forward, _, _) in FORWARDS.items()
    ]
    path.write_text("import torch\n" + PARTS + "\n".join(mixers))
    load_plugin(path)
    return path


def runs(study: dict, architecture: str | dict) -> list[RunSpec]:
    length = FORWARDS[architecture][1] if isinstance(architecture, str) and architecture in FORWARDS else 32
    study = study | {"data": study["data"] | {"seq_len": length}}
    return plan_runs(StudyConfig.model_validate(study | {"architectures": ["transformer++", architecture]}), 257)


@pytest.mark.parametrize("name", [name for name, (_, _, said) in FORWARDS.items() if said is None])
def test_a_sound_plugin_trains(name, study, plugin):
    assert not refuse_leaks(runs(study, name), torch.device("cpu"))[name]["unproved"]


@pytest.mark.parametrize("name", UNPROVED)
def test_what_raises_is_not_proved(name, study, plugin):
    reason = refuse_leaks(runs(study, name), torch.device("cpu"))[name]["unproved"]
    assert any(UNPROVED[name][2] in found for found in reason), reason


@pytest.mark.parametrize("name", [name for name, (_, _, said) in FORWARDS.items() if said and name not in UNPROVED])
def test_a_plugin_that_leaks_is_refused(name, study, plugin):
    _, length, said = FORWARDS[name]
    study |= {"model": {"hidden": 16, "layers": 3 if name == "proof deeper" else 1}}
    place = re.escape(f"mixer {name!r} ({plugin}:") + r"\d+\) "
    with pytest.raises(ConfigError, match=f"{place}{said}") as caught:
        refuse_leaks(runs(study, name), torch.device("cpu"))
    more = f" --length {length}" if length > 1100 else ""
    assert str(caught.value).endswith(f"; run basecap check --mixer '{name}' --plugin {plugin}{more}")


def test_layers_below_a_decoder_are_proved(study, plugin):
    task = {"train": ["mad-compression"], "cells": [{"length": 32, "vocab": 16}], "examples": 40, "held_out": 10}
    study |= {"data": None, "task": task, "evals": ["recall"]}
    for name, said in (
        ("proof fine", None),
        ("proof ahead", FUTURE),
        ("proof batch", "mixes the sequences of a batch"),
    ):
        planned = plan_runs(StudyConfig.model_validate(study | {"architectures": ["transformer++", name]}), 16)
        assert {run.model.readout for run in planned} == {"last"}
        if said is None:
            assert not refuse_leaks(planned, torch.device("cpu"))[name]["unproved"]
        else:
            with pytest.raises(ConfigError, match=said):
                refuse_leaks(planned, torch.device("cpu"))


def test_the_precision_of_training_is_proved_and_its_rounding_no_leak(study, plugin):
    study["train"]["precision"] = "bf16"
    assert not refuse_leaks(runs(study, "proof fourier"), torch.device("cpu"))["proof fourier"]["unproved"]
    with pytest.raises(ConfigError, match=f"{FUTURE} .* in bf16"):
        refuse_leaks(runs(study, "proof lower"), torch.device("cpu"))


def test_a_leak_is_found_in_a_pattern_and_in_another_body(study, plugin):
    pattern = {
        "name": "both",
        "use": "transformer++",
        "layers": ["transformer++", "proof ahead"],
        "model": {"layers": 2},
    }
    for entry, command in ((pattern, "check --mixer 'proof ahead'"), ("proof ahead in gpt", "in gpt'")):
        with pytest.raises(ConfigError, match=f"sees the future.*{command}"):
            refuse_leaks(runs(study, entry), torch.device("cpu"))


def test_a_leak_is_refused_before_anything_is_written(study, plugin, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(study | {"architectures": ["transformer++", "proof ahead"]}))
    with pytest.raises(ConfigError, match=r"mixer 'proof ahead' \(.*proofs.py:\d+\) sees the future"):
        run(path, tmp_path / "out", plugins=(plugin,))
    assert not (tmp_path / "out").exists()


def test_each_layer_is_proved_at_its_own_index(study, plugin):
    study |= {"model": {"hidden": 16, "layers": 4}}
    with pytest.raises(ConfigError, match=FUTURE):
        refuse_leaks(runs(study, "proof deeper"), torch.device("cpu"))
    study |= {"model": {"hidden": 16, "layers": 2}}
    assert not refuse_leaks(runs(study, "proof deeper"), torch.device("cpu"))["proof deeper"]["unproved"]


def test_a_proof_is_repeated_only_for_another_code_or_size(study, plugin, monkeypatch):
    once = refuse_leaks(runs(study, "proof fine"), torch.device("cpu"))
    monkeypatch.setattr("basecap.run.proofs.prove_causality", None)  # would raise
    assert refuse_leaks(runs(study, "proof fine"), torch.device("cpu"), once) == once
    with pytest.raises(TypeError):
        refuse_leaks(runs(study | {"model": {"hidden": 32, "layers": 1}}, "proof fine"), torch.device("cpu"), once)


def test_what_does_not_fit_into_the_budget_is_not_proved(study, plugin, monkeypatch):
    monkeypatch.setattr("basecap.testing.check_model.BUDGET", -1.0)
    proof = refuse_leaks(runs(study, "proof fine"), torch.device("cpu"))["proof fine"]
    assert not proof["covered"]
    assert proof["unproved"][0].startswith("32 tokens, 9 rows, normal inputs, float64: the -1 s of a proof are over")


class Packaged(Mixer):
    def forward(self, x, segments=None):
        return x.roll(-1, 1)

    def init_cache(self, batch, max_length):
        return Cache(tensors={})

    def step(self, x, cache):
        return x

    def flops(self, length):
        return 0.0

    def state_bytes(self, length):
        return 0


def test_mixers_of_other_packages_are_proved_too(study):
    mixer("proof packaged", backbone="gpt", paper="none", summary="as an entry point would give it")(Packaged)
    with pytest.raises(ConfigError, match=r"sees the future.*; run basecap check --mixer 'proof packaged'$"):
        refuse_leaks(runs(study, "proof packaged"), torch.device("cpu"))
