"""The benchmark of whole models counts what it ran, and one failure costs one row."""

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from basecap.bench import contenders, decoding, models, peers
from basecap.bench.contenders import announcement, named, of_study, with_attention
from basecap.bench.models import run, shown
from basecap.cli import app
from basecap.errors import ConfigError
from basecap.models.config import model_config
from basecap.models.decoding_speed import Load
from basecap.models.language_model import LanguageModel

NAMES = ["transformer++", "transformer++ window"]
MODELS = {name: model_config(name, hidden=32, vocab=64, layers=1, max_length=16) for name in NAMES}
FIRST = {NAMES[0]: MODELS[NAMES[0]]}
TINY = {"device": torch.device("cpu"), "setting": models.BenchSetting(hidden=32, vocab=64, length=16, batch=2, steps=3)}


def test_rows_agree_with_their_setting():
    found = run(MODELS, **TINY)
    assert [row["architecture"] for row in found["rows"]] == NAMES
    for row in found["rows"]:
        assert row["tokens_per_s"] == pytest.approx(2 * 16 * 1e3 / row["ms_per_step"])
        assert row["tflops"] > 0 and row["mfu"] is None and row["mfu_palm"] is None
        assert "note" not in row
        assert row["ops"].keys() >= {"linear_cross_entropy"} and not {"ops", "mfu"} & shown(row).keys()
    assert found["rows"][0]["relative to transformer++"] == 1.0
    assert found["setting"]["length"] == 16 and found["environment"]["packages"]["torch"]
    assert found["complete"]


def test_the_chosen_attention_runs():
    q = torch.ones(1, 1, 2, 8)
    seen = []

    def job():
        with pytest.raises(RuntimeError, match=r"No (available|viable)"):
            seen.append(torch.nn.functional.scaled_dot_product_attention(q, q, q))
        return {"tokens_per_s": 1.0}

    assert with_attention("cuDNN", job) == {"tokens_per_s": 1.0} and not seen
    assert models.shown({"architecture": "a", "attention": "cuDNN", "x": 1}) == {"architecture": "a with cuDNN", "x": 1}


def test_the_operations_of_a_transformer_as_palm_counts_them():
    with torch.device("meta"):
        model = LanguageModel(model_config("transformer++", hidden=768, vocab=32_000, max_length=2048))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    attention = 12 * len(model._blocks) * model.config.hidden * 2048
    assert models._palm_flops(model, 2048) == pytest.approx(2048 * (6 * parameters + attention), rel=1e-3)


def test_utilisation_is_relative_to_the_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "describe", lambda device: {"device": "NVIDIA H200"})
    (row,) = run(FIRST, **TINY)["rows"]
    assert row["mfu"] == pytest.approx(row["tflops"] / 989)
    assert row["mfu"] < row["mfu_palm"] < 2 * row["mfu"]


def test_hours_on_a_cpu_are_announced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contenders, "matrix_rate", lambda device: 1e9)
    setting = models.BenchSetting(length=2048, batch=16)
    large = models.operations(named(["transformer++"], hidden=768, vocab=32_000, length=2048), setting)
    assert large > 3 * 16 * 2048 * 6 * 100e6
    said = announcement(large, torch.device("cpu"))
    assert said.startswith("at these sizes this takes at least 2 days on this CPU; choose smaller ones, or small")
    assert announcement(large, torch.device("cuda")) is None
    reading = decoding.operations(MODELS, Load(prompt=16, new=32, batch=2))
    assert 0 < reading < models.operations(MODELS, TINY["setting"])
    assert announcement(reading, torch.device("cpu")) is None


def test_an_architecture_in_another_body():
    own, other = named(["transformer++", "transformer++ in rwkv-7"], hidden=32, vocab=64, length=16).values()
    assert (own.backbone, other.backbone) == ("transformer++", "rwkv-7") and own.layers == other.layers
    with pytest.raises(ConfigError, match="did you mean 'rwkv-7'"):
        named(["transformer++ in rwkw-7"], hidden=32, vocab=64, length=16)


@pytest.mark.parametrize("broken", NAMES)
@pytest.mark.parametrize(
    ("error", "note"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB."), "cannot run: out of memory at"),
        (RuntimeError("No kernel fits. Look elsewhere.\nmore"), "cannot run: No kernel fits"),
        (AssertionError(), "cannot run: AssertionError"),
    ],
)
def test_a_failure_costs_one_row(broken: str, error: Exception, note: str, monkeypatch: pytest.MonkeyPatch):
    own = models._own

    def fail(config, setting, device):
        if config.layers[0].use == broken:
            raise error
        return own(config, setting, device)

    monkeypatch.setattr(models, "_own", fail)
    rows = {row["architecture"]: row for row in run(MODELS, **TINY)["rows"]}
    assert rows[broken]["note"].startswith(note)
    assert "tokens_per_s" not in rows[broken]
    assert [name for name in NAMES if "tokens_per_s" in rows[name]] == [name for name in NAMES if name != broken]


def test_a_study_gives_its_sequence_length_and_vocabulary():
    found = of_study("quickstart", ["based"], scale=None, length=None)
    assert {(model.vocab, model.max_length, model.hidden) for model in found.values()} == {(257, 128, 64)}
    assert list(found) == ["transformer++", "based"]
    assert of_study("quickstart", [], scale=None, length=99)["based"].max_length == 99


def test_a_study_of_any_architecture_is_measured_with_any():
    assert list(of_study("limited-zoo", ["gla"], scale=None, length=None)) == ["transformer++", "gla"]
    with pytest.raises(ConfigError, match="study bc-table-1 has no architecture 'gla'"):
        of_study("bc-table-1", ["gla"], scale=None, length=None)


def test_names_and_sizes_that_cannot_be_built_are_refused():
    with pytest.raises(ConfigError, match="did you mean"):
        named(["transformer++", "transformer+"], hidden=32, vocab=64, length=16)
    with pytest.raises(ConfigError, match=r"architecture 'transformer\+\+' at width 65: RoPE needs an even head size"):
        named(NAMES, hidden=65, vocab=64, length=16)


@pytest.mark.parametrize("option", ["--hidden=0", "--length=0", "--batch=-2"])
def test_sizes_below_one_are_refused(option: str):
    assert CliRunner().invoke(app, ["bench", "models", "--device", "cpu", option]).exit_code == 2


def test_a_cpu_trains_on_one_sequence_by_default(monkeypatch: pytest.MonkeyPatch):
    batches = []
    monkeypatch.setattr(models, "run", lambda _, setting, **options: batches.append(setting.batch) or {"rows": []})
    for more in ([], ["--batch", "3"]):
        CliRunner().invoke(app, ["bench", "models", "--device", "cpu", "--only", "transformer++", *more])
    assert batches == [1, 3]


@pytest.mark.parametrize("command", ["models", "ops"])
@pytest.mark.parametrize("file", ["none/found.json", ".", "/proc/found.json"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(command: str, file: str, tmp_path):
    done = CliRunner().invoke(app, ["bench", command, "--device", "cpu", "--json", str(tmp_path / file)])
    assert isinstance(done.exception, ConfigError) and "cannot be written" in str(done.exception)


def test_an_interrupted_run_keeps_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path):
    def interrupt(config, setting, device):
        if config.layers[0].use == NAMES[1]:
            raise KeyboardInterrupt
        return {"tokens_per_s": 1.0}

    monkeypatch.setattr(models, "_own", interrupt)
    file = tmp_path / "models.json"
    only = [part for name in NAMES for part in ("--only", name)]
    result = CliRunner().invoke(app, ["bench", "models", *only, "--device", "cpu", "--json", str(file)])
    assert result.exit_code == 130
    assert "measurements that finished" in result.output
    assert [row["architecture"] for row in json.loads(file.read_text())["rows"]] == NAMES[:1]


def test_every_row_is_kept_as_soon_as_it_is_measured():
    sizes = []
    run(MODELS, **TINY, save=lambda found: sizes.append((len(found["rows"]), found["complete"])))
    assert sizes == [(1, False), (2, False)]


@pytest.mark.parametrize(
    ("seconds", "counted"), [([9, 1, 1, 2, 3, 4], [2, 3, 4]), ([9, 6, 7], [7]), ([9, 1, 6, 8], [8])]
)
def test_a_slow_model_is_timed_once(seconds: list[float], counted: list[float], monkeypatch: pytest.MonkeyPatch):
    clock = iter(seconds)
    monkeypatch.setattr(models, "_seconds", lambda step, calls, device: [next(clock) for _ in range(calls)])
    assert models._times(lambda: None, 3, torch.device("cpu")) == counted
    assert next(clock, None) is None


class FakeLM(nn.Module):
    """What a causal language model of the library looks like from outside."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.config = config
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        logits = self.table(input_ids) @ self.table.weight.T
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class NoAttention:
    """A model that needs a package nobody installed."""

    def __init__(self, config: SimpleNamespace):
        raise ImportError("Please install Flash Attention first. It is large.")


def find(monkeypatch: pytest.MonkeyPatch, missing: str | None) -> None:
    """Let both packages of the library be found but `missing`; PyTorch looks for others."""
    known, real = {"fla", "fla.models"}, importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: (None if name == missing else name) if name in known else real(name, package),
    )


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flash-linear-attention whose models are the same, except one that cannot be built."""
    fake = ModuleType("fla.models")
    for peer in peers.PEERS:
        vars(fake)[f"{peer.stem}Config"] = SimpleNamespace
        vars(fake)[f"{peer.stem}ForCausalLM"] = NoAttention if peer.stem == "Transformer" else FakeLM
    monkeypatch.setitem(sys.modules, "fla.models", fake)
    find(monkeypatch, missing=None)


@pytest.mark.usefixtures("library")
def test_peers_follow_in_the_same_run():
    rows = run(FIRST, **TINY, peer=True)["rows"]
    assert [row["architecture"] for row in rows[1:]] == [f"fla {peer.stem}ForCausalLM" for peer in peers.PEERS]
    assert rows[1]["note"] == "cannot run: Please install Flash Attention first"
    assert rows[1]["relative to transformer++"] is None
    for row in rows[2:]:
        assert row["note"] == "not compiled"
        assert row["parameters"] == 64 * 32
        assert row["relative to transformer++"] == row["tokens_per_s"] / rows[0]["tokens_per_s"]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("peer", [peer for peer in peers.PEERS if peer.stem != "Transformer"])
def test_a_peer_gets_the_width_of_the_table(peer: peers.Peer):
    config = peers.build(peer, hidden=768, vocab=50).config
    assert (config.hidden_size, config.vocab_size, config.num_hidden_layers) == (768, 50, peer.blocks)
    assert peer.heads(768).items() <= vars(config).items()


@pytest.mark.parametrize("missing", ["fla", "fla.models"])
def test_peers_without_their_package_are_refused(missing: str, monkeypatch: pytest.MonkeyPatch):
    find(monkeypatch, missing)
    with pytest.raises(ConfigError, match=r"package flash-linear-attention.*basecap\[gpu\]"):
        run(FIRST, **TINY, peer=True)
