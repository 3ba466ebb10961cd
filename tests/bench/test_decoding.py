"""The benchmark of decoding counts what it ran, and every mixer decodes as a CUDA graph needs it."""

import copy
import json
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from basecap.bench import decoding as generate
from basecap.bench import models as rows_of_models
from basecap.bench.contenders import ATTENTIONS, compare, entries, named, with_attention
from basecap.bench.decoding import run
from basecap.cli import app
from basecap.errors import ConfigError
from basecap.models import decoding_speed
from basecap.models.config import LayerConfig, model_config
from basecap.models.decoding_speed import Load
from basecap.models.decoding_steps import GraphSteps
from basecap.models.generate import read_prompts
from basecap.models.language_model import LanguageModel
from tests._architectures import distinct_names
from tests.recorded_graph import recorded

LOAD = Load(prompt=5, new=8, batch=4, rows=2, places=2, tokens=4, repeats=1)


def small(name: str) -> LanguageModel:
    return LanguageModel(model_config(name, hidden=32, vocab=31, layers=2, max_length=64))


def pointers(caches) -> list[int]:
    parts = [part for cache in caches for part in (cache.mixer, cache.feed_forward)]
    return [tensor.data_ptr() for part in parts for tensor in part.tensors.values()]


@pytest.mark.parametrize("name", distinct_names())
def test_decoding_can_be_a_cuda_graph(name: str):
    """A step writes to tensors that stay where they are, and reads no number back to the host."""
    model = small(name).initialise(0)
    tokens = torch.randint(0, 31, (4, 5), generator=torch.Generator().manual_seed(0))
    whole, pieces = (model.init_cache(4, 8) for _ in range(2))
    with torch.no_grad():
        logits = model.prefill(tokens, whole)
        before = pointers(pieces)
        torch.testing.assert_close(read_prompts(model, tokens, pieces, 2), logits, rtol=1e-4, atol=1e-5)
        step = [model.step(tokens[:, :1], caches) for caches in (whole, pieces)]
        torch.testing.assert_close(step[1], step[0], rtol=1e-4, atol=1e-5)
        assert pointers(pieces) == before
        with torch.device("meta"):  # whose tensors have no numbers
            numberless = small(name)
            caches = numberless.init_cache(4, 8)
            for _ in range(2):  # of an empty cache, and of another
                numberless.step(torch.zeros((4, 1), dtype=torch.int64), caches)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("transformer++ window", {"window": 16}),
        ("top1-chunk-exact", {"chunk": 16}),
        ("mamba-2", {}),
    ],
)
def test_compiled_reading_of_a_prompt_is_the_same(name: str, options: dict, monkeypatch: pytest.MonkeyPatch):
    pattern = (LayerConfig(use=name, mixer=options),)
    config = model_config(name, hidden=32, vocab=31, layers=2, pattern=pattern, backbone="rwkv-7", max_length=64)
    model = LanguageModel(config).initialise(0)
    tokens = torch.randint(0, 31, (2, 20), generator=torch.Generator().manual_seed(0))
    caches = [model.init_cache(2, 24) for _ in range(3)]
    counters = torch._dynamo.utils.counters
    with torch.no_grad():
        expected = model.prefill(tokens, caches[0])
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        compiled = copy.copy(model)
        compiled.compile_prefill()
        counters.clear()
        assert torch.equal(compiled.prefill(tokens, caches[1]), expected)
        graphs = counters["stats"]["unique_graphs"]
        assert graphs == 2 and not counters["graph_break"]  # all blocks, the logits
        model.prefill(tokens, caches[2])
        assert counters["stats"]["unique_graphs"] == graphs
        following = [model.step(tokens[:, :1], cache) for cache in caches]
    assert torch.equal(following[0], following[1]) and torch.equal(following[0], following[2])


@pytest.mark.parametrize("name", ["transformer++ alibi", "top1-chunk-exact", "top1-element", "fox", "rwkv-7"])
def test_compiled_decoding_is_the_same_and_one_code_serves_all_lengths(name: str, monkeypatch: pytest.MonkeyPatch):
    model = small(name).initialise(0)
    tokens = torch.randint(0, 31, (2, 12), generator=torch.Generator().manual_seed(0))
    plain, compiled = (model.init_cache(2, 16) for _ in range(2))
    counters = torch._dynamo.utils.counters
    with torch.no_grad():
        for caches in (plain, compiled):
            model.prefill(tokens[:, :5], caches)
        expected = [model.step(tokens[:, t : t + 1], plain) for t in range(5, 12)]
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        model.compile_decoding()
        counters.clear()
        found = [model.step(tokens[:, t : t + 1], compiled) for t in range(5, 12)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    # All blocks and the logits, once each; the first block of RWKV-7 makes values that the others read.
    assert counters["stats"]["unique_graphs"] == (3 if name == "rwkv-7" else 2) and not counters["graph_break"]


def test_a_row_for_each_model_and_its_speed_relative_to_the_first():
    models = {name: small(name).config for name in ("transformer++", "rwkv-7")}
    found = run(models, LOAD, device=torch.device("cpu"))
    first, second = found["rows"]
    assert found["complete"] and found["load"]["prompt"] == 5
    assert first["prefill_tokens_per_s"] == pytest.approx(4 * 5 / first["first_token_seconds"])
    assert first["decode_tokens_per_s"] == pytest.approx(4e3 / first["ms_per_token"])
    assert second["decode relative to transformer++"] == pytest.approx(
        second["decode_tokens_per_s"] / first["decode_tokens_per_s"]
    )
    assert second["alone, from Python, relative to transformer++"] == pytest.approx(
        second["alone_python_tokens_per_s"] / first["alone_python_tokens_per_s"]
    )
    assert "alone_tokens_per_s" not in first and not any("alone" in key for key in generate.shown(first))
    with torch.device("meta"):
        model = small("rwkv-7")
    assert second["state_bytes"] == 4 * model.state_bytes(13)


def test_a_model_that_cannot_run_has_a_note_and_an_interruption_keeps_rows(monkeypatch: pytest.MonkeyPatch):
    def measure(name, config, load, device, alone):
        raise {1: torch.OutOfMemoryError("CUDA out of memory."), 2: KeyboardInterrupt}[config.depth]

    monkeypatch.setattr(generate, "_measure", measure)
    models = {
        "big": model_config("transformer++", hidden=32, vocab=31, layers=1),
        "other": model_config("transformer++", hidden=32, vocab=31, layers=2),
    }
    found = run(models, LOAD, device=torch.device("cpu"))
    assert [row["architecture"] for row in found["rows"]] == ["big"] and not found["complete"]
    assert found["rows"][0]["note"].startswith("cannot run: out of memory")


def test_speeds_are_compared_with_each_attention_and_the_fastest():
    rows = [
        {
            "architecture": "full",
            "attention": attention,
            "prefill_tokens_per_s": speed,
            "decode_tokens_per_s": 2 * speed,
        }
        for attention, speed in (("FlashAttention-2", 10.0), ("cuDNN", 20.0))
    ]
    rows += [{"architecture": "other", "attention": None, "prefill_tokens_per_s": 40.0, "note": "no decoding"}]
    compare(rows, generate.SPEEDS)
    assert rows[2]["prefill relative to full with FlashAttention-2"] == 4
    assert rows[2]["prefill relative to full with its fastest attention"] == 2
    assert rows[2]["decode relative to full with cuDNN"] is None
    assert rows[0]["decode relative to full with its fastest attention"] == 0.5


def test_one_sequence_has_a_row_for_each_architecture():
    rows = [
        {"architecture": "full", "attention": kernel, "alone_python_tokens_per_s": 10.0, "alone_tokens_per_s": 40.0}
        for kernel in ATTENTIONS
    ]
    rows += [{"architecture": "other", "attention": None, "alone_python_tokens_per_s": 5.0, "note": "no graph"}]
    compare(rows, generate.SPEEDS)
    failed = {"architecture": "failed", "attention": None, "note": "cannot run"}
    assert generate.shown_alone([*rows, failed])[-1]["note"] == "cannot run"
    assert generate.shown_alone(rows) == [
        {"architecture": "full", "from Python": 10, "from Python / full": 1, "as a graph": 40, "as a graph / full": 1},
        {
            "architecture": "other",
            "from Python": 5,
            "from Python / full": 0.5,
            "as a graph": None,
            "as a graph / full": None,
        },
    ]


def test_one_sequence_is_timed_as_a_graph_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoding_speed, "GraphSteps", partial(GraphSteps, capture=recorded))
    model = small("transformer++").initialise(0)
    with torch.no_grad():
        assert decoding_speed._alone_seconds(model, LOAD, graph=True) > 0
        monkeypatch.setattr(decoding_speed, "GraphSteps", partial(GraphSteps, capture=refuse_capture))
        assert decoding_speed._alone_seconds(model, LOAD, graph=True) is None


def test_one_sequence_is_timed_once_whatever_attention_and_writes_no_more_than_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    read, steps = LanguageModel.prefill, []
    monkeypatch.setattr(LanguageModel, "prefill", lambda *given: steps.append(0) or read(*given))
    step = LanguageModel.step

    def counted(*given):
        steps[-1] += 1
        return step(*given)

    monkeypatch.setattr(LanguageModel, "step", counted)
    monkeypatch.setattr(generate, "entries", lambda models, device: [("one", None, models["one"])] * 2)
    monkeypatch.setattr(rows_of_models, "progress", partial(rows_of_models.progress, every=0))
    positions = model_config("transformer", hidden=32, vocab=31, layers=1, max_length=40)
    load = Load(prompt=8, new=32, batch=1, repeats=3)
    found = run({"one": positions}, load, device=torch.device("cpu"))
    assert [row.get("note") for row in found["rows"]] == [None, None]
    prefill, decode = [0] * 4, 4 * 32  # one that does not count and three repeats, each
    alone = decoding_speed.WARM_UP + 3 * 9
    assert steps == [alone, *prefill[1:], decode, *prefill[1:], decode]
    assert found["rows"][0]["alone_python_tokens_per_s"] == found["rows"][1]["alone_python_tokens_per_s"]
    assert "bench generate: 0 of 2 rows (0 %); one" in capsys.readouterr().err


def test_one_sequence_can_be_all_that_is_measured(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generate, "time_decoding", lambda *given: pytest.fail("measures a batch"))
    monkeypatch.setattr(decoding_speed, "ALONE", 8)
    file = tmp_path / "found.json"
    command = ["bench", "generate", "--device", "cpu", "--hidden", "32", "--new", "32", "--alone", "--json", str(file)]
    done = CliRunner().invoke(app, [*command, "--only", "transformer++", "--only", "rwkv-7"])
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    assert (found["load"]["prompt"], found["load"]["batch"], found["complete"]) == (8, 1, True)
    assert all(row["alone_python_tokens_per_s"] > 0 for row in found["rows"])
    assert "one sequence" in done.output and "prefill" not in done.output


def refuse_capture(run):
    raise RuntimeError("not permitted")


def test_a_study_gives_its_architectures(tmp_path, monkeypatch: pytest.MonkeyPatch):
    measured = []
    row = {"first_token_seconds": 2.0, "prefill_tokens_per_s": 2.0, "decode_tokens_per_s": 3.0, "bandwidth": None}
    monkeypatch.setattr(generate, "_measure", lambda name, config, *more: measured.append(config) or row)
    file = tmp_path / "found.json"
    sizes = ["--prompt", "4", "--new", "32", "--batch", "1", "--json", str(file)]
    command = ["bench", "generate", "--device", "cpu", "--study", "bc-table-3", "--scale", "test", "--only", "rwkv-7"]
    done = CliRunner().invoke(app, [*command, *sizes])
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["architecture"] for row in rows] == ["transformer++", "rwkv-7"]
    assert [config.backbone for config in measured] == ["rwkv-7", "rwkv-7"] and measured[0].max_length == 36
    assert "token," in done.output and "bandwidth" not in done.output


@pytest.mark.parametrize(
    ("first", "attentions"), [("transformer++", ["FlashAttention-2", "cuDNN", None]), ("mamba-2", [None, None])]
)
def test_on_a_gpu_a_first_model_with_attention_runs_with_each_kernel(first: str, attentions: list[str | None]):
    models = named([first, "rwkv-7"], hidden=32, vocab=31, length=16)
    assert [row[1] for row in entries(models, torch.device("cuda"))] == attentions
    assert [row[1] for row in entries(models, torch.device("cpu"))] == [None, None]


def test_code_compiled_for_one_attention_is_not_taken_for_another():
    def tag() -> dict:
        return {"tag": torch.compiler.config.cache_key_tag}

    tags = [with_attention(attention, tag)["tag"] for attention in (*ATTENTIONS, None)]
    assert len(set(tags)) == 3 and tags[-1] == ""


@pytest.mark.parametrize(("new", "starts"), [(32, [5]), (63, [21]), (64, [13, 29]), (332, [55, 155, 255])])
def test_decoding_is_measured_at_different_places(new: int, starts: list[int]):
    assert Load(prompt=5, new=new).starts == starts


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--batch", "6", "--rows", "4"], "4 prompts at once do not divide a batch of 6; choose a divisor."),
        (["--new", "5"], "decoding is measured over 32 tokens at a time; raise --new from 5."),
        (["--scale", "test"], "--scale is that of a study; give one with --study."),
        (["--only", "mamba2"], "did you mean 'mamba-2'"),
        (["--study", "bc-table-3", "--only", "rwkv7"], "did you mean 'rwkv-7'"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], error: str):
    done = CliRunner().invoke(app, ["bench", "generate", "--device", "cpu", *options])
    assert isinstance(done.exception, ConfigError) and error in str(done.exception)
