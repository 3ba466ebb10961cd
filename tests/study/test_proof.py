"""No architecture of a plugin trains that sees the future."""

from pathlib import Path

import pytest
import torch
import yaml

from basecap.errors import ConfigError
from basecap.mixers import Cache, Mixer, mixer
from basecap.registry import load_plugin
from basecap.study.config import StudyConfig
from basecap.study.plan import RunSpec, plan_runs
from basecap.study.proof import refuse_unsound
from tests.study._execute import PLUGIN, run

#: Name of a mixer -> what its forward returns, and what is said of it.
FORWARDS = {
    "proof fine": ("self.out(x.cumsum(1))", None),
    "proof ahead": ("self.out(x.roll(-1, 1))", "sees the future: outputs before position 1 move when later tokens"),
    "proof mean": ("self.out(x - x.mean(1, keepdim=True))", "sees the future: outputs before position"),
    "proof infinite": ("x / 0", "gives numbers that are not finite"),
    "proof narrow": ("x[..., :1]", r"cannot be trained \(mixer .* must return \[B, T, D\]"),
    "proof random": ("x * torch.rand_like(x)", None),
    "proof single": ("torch.zeros(3).float() @ x", None),  # raises: training will say so
    "proof kernel": ("fails_in_double(x).roll(-1, 1)", "sees the future"),
    "proof blocks": ("means_of_blocks(x)", "sees the future"),
}
DOUBLE = """
def fails_in_double(x):
    if x.dtype == torch.float64:
        raise TypeError("no kernel for double precision")
    return x

def means_of_blocks(x):
    return x.unflatten(1, (-1, 256)).mean(2, keepdim=True).expand(-1, -1, 256, -1).flatten(1, 2)
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("proofs") / "proofs.py"
    out = "self.out = torch.nn.Linear(layer.hidden, layer.hidden, bias=False)\n        "
    code = PLUGIN.replace("self.calls = 0", out + "torch.nn.init.zeros_(self.out.weight)")
    mixers = [
        code.replace('"breaks"', f'"{name}"')
        .replace("self.calls += 1\n", "\n")
        .replace("x * torch.nan if self.calls >= 3 else x", forward)
        for name, (forward, _) in FORWARDS.items()
    ]
    path.write_text(DOUBLE + "\n".join(mixers))
    load_plugin(path)
    return path


def runs(study: dict, architecture: object) -> list[RunSpec]:
    if architecture == "proof blocks":
        study = study | {"data": study["data"] | {"seq_len": 1024}}
    return plan_runs(StudyConfig.model_validate(study | {"architectures": ["transformer++", architecture]}), 257)


@pytest.mark.parametrize("name", FORWARDS)
def test_what_a_plugin_must_prove(name, study, plugin):
    said = FORWARDS[name][1]
    if said is None:
        assert refuse_unsound(runs(study, name), torch.device("cpu")) is None
    else:
        with pytest.raises(ConfigError, match=said) as caught:
            refuse_unsound(runs(study, name), torch.device("cpu"))
        assert str(caught.value).endswith(f"; run basecap check --mixer '{name}' --plugin {plugin}")


def test_a_leak_is_found_in_a_pattern_and_in_another_body(study, plugin):
    pattern = {
        "name": "both",
        "use": "transformer++",
        "layers": ["transformer++", "proof ahead"],
        "model": {"layers": 2},
    }
    for entry, command in ((pattern, "check --mixer 'proof ahead'"), ("proof ahead in gpt", "in gpt'")):
        with pytest.raises(ConfigError, match=f"sees the future.*{command}"):
            refuse_unsound(runs(study, entry), torch.device("cpu"))


def test_a_leak_is_refused_before_anything_is_written(study, plugin, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(study | {"architectures": ["transformer++", "proof ahead"]}))
    with pytest.raises(ConfigError, match="mixer 'proof ahead' sees the future"):
        run(path, tmp_path / "out", plugins=(plugin,))
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_built_smaller_is_left_to_training(study, tmp_path):
    path = tmp_path / "proof_deep.py"
    code = PLUGIN.replace('"breaks"', '"proof deep"').replace("self.calls >= 3", "False")
    path.write_text(code.replace("self.calls = 0", "self.calls = 1 / (layer.depth - 1) / (layer.depth - 2)"))
    load_plugin(path)
    study |= {"model": {"hidden": 16, "layers": 4}}
    assert refuse_unsound(runs(study, "proof deep"), torch.device("cpu")) is None


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
        refuse_unsound(runs(study, "proof packaged"), torch.device("cpu"))
