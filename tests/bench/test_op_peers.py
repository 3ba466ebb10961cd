"""Kernels of other libraries are measured where they are installed and right, beside the same formula of ours."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from typer.testing import CliRunner

from basecap.bench import op_peers
from basecap.bench.op_peers import Compared, Contender, choice_mask, measure
from basecap.cli import app
from basecap.ops import top1_chunk, top1_chunk_choice
from basecap.ops.known_bad import FLA_DELTA
from basecap.testing.marks import requires_gpu

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(what, run, repeats):
        run()
        return {f"{what} graph ms": 1.0, f"{what} from Python ms": 2.0}

    monkeypatch.setattr(op_peers, "timed", timed)
    monkeypatch.setattr(op_peers, "milliseconds", lambda run, repeats: 3.0)


def compare(**contenders: Contender) -> list[op_peers.Row]:
    x = torch.arange(1.0, 5.0).view(1, 4)
    return measure(Compared(contenders, [x], torch.ones(1, 4)), 1, CPU)


def test_a_peer_is_compared_with_what_computes_the_same(monkeypatch: pytest.MonkeyPatch):
    ours = Contender(lambda: lambda x: x * x)
    monkeypatch.setattr(op_peers, "in_doubt_on", lambda device: {FLA_DELTA: "ptxas 12.8 may be wrong"})
    (first, same, other) = compare(
        ours=ours,
        same=Contender(lambda: lambda x: x**2, kernels=FLA_DELTA, like="ours"),
        other=Contender(lambda: lambda x: 1.5 * x**2, like="ours"),
    )
    assert first == {"op": "ours", "length": 4, "forward+backward graph ms": 1, "forward+backward from Python ms": 2}
    assert same["differs"] == 0 and other["differs"] == pytest.approx(0.5)
    assert same["in doubt"] == "ptxas 12.8 may be wrong" and "in doubt" not in other


def test_what_is_absent_known_to_be_wrong_or_fails_has_no_times(monkeypatch: pytest.MonkeyPatch):
    def build():
        raise AssertionError("groups of 16.\nmore")

    monkeypatch.setattr(op_peers, "known_bad_on", lambda device: {FLA_DELTA: "triton 3.5 is wrong: install another"})
    rows = compare(
        absent=Contender(build, "nowhere.ops"),
        wrong=Contender(build, "json", FLA_DELTA),
        fails=Contender(build),
    )
    assert rows == [
        {"op": "absent", "absent": "nowhere.ops"},
        {"op": "wrong", "cannot run": "triton 3.5 is wrong: install another"},
        {"op": "fails", "cannot run": "groups of 16."},
    ]


def test_what_cannot_be_a_graph_is_timed_from_python(monkeypatch: pytest.MonkeyPatch):
    def timed(what, run, repeats):
        raise RuntimeError("not permitted.\nmore")

    monkeypatch.setattr(op_peers, "timed", timed)
    (row,) = compare(reads=Contender(lambda: lambda x: x * 2))
    assert row["forward+backward graph ms"] is None and row["forward+backward from Python ms"] == 3
    assert row["no graph"] == "not permitted."


def library(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install made-up peers that compute what ours do, and return the names of those that are called."""
    called: list[str] = []

    def install(module: str, **functions):
        for end in range(1, module.count(".") + 2):
            name = ".".join(module.split(".")[:end])
            fake = sys.modules.get(name) or ModuleType(name)
            fake.__spec__ = SimpleNamespace(name=name)
            fake.__path__ = []
            monkeypatch.setitem(sys.modules, name, fake)
        vars(sys.modules[module]).update(functions)

    def delta(name: str, ours):
        def function(q, k, v, g, beta, *, scale):
            called.append(name)
            assert scale == 1
            return ours(q, k, v, beta, g)

        return function

    def flash(q, k, v, *, causal):
        called.append("flash")
        assert causal
        return op_peers.sdpa(torch.nn.attention.SDPBackend.MATH, q, k, v), None

    install("fla.ops.gated_delta_rule", chunk_gated_delta_rule=delta("gated", op_peers.delta_rule))
    install("fla.ops.kda", chunk_kda=delta("kda", op_peers.channel_delta_rule))
    install("flash_attn_interface", flash_attn_func=flash)
    return called


def test_the_delta_rules_of_fla_get_the_same_inputs(monkeypatch: pytest.MonkeyPatch):
    called = library(monkeypatch)
    monkeypatch.setattr(op_peers, "DELTA", (2, 16, 20))
    rows = [*measure(op_peers.delta_peers(64, CPU), 1, CPU), *measure(op_peers.kda_peers(64, CPU), 1, CPU)]
    assert [row["op"] for row in rows] == ["delta_rule", "fla gated delta rule", "channel_delta_rule", "fla kda"]
    # The library takes beta in bfloat16, whose steps are 2^-8.
    assert rows[1]["differs"] < 2**-7 and rows[3]["differs"] < 2**-7 and rows[0]["length"] == 20
    assert set(called) == {"gated", "kda"}


def test_flash_attention_is_imported_when_it_is_measured(monkeypatch: pytest.MonkeyPatch):
    called = library(monkeypatch)
    compared = op_peers.attention_peers(2, 16, 32, CPU)
    assert not called
    names = ["flash-attention-3", "flash-attention-4"]
    contenders = {name: compared.contenders[name] for name in names}
    first, second = measure(compared._replace(contenders=contenders), 1, CPU)
    assert called and "cannot run" not in first
    assert second == {"op": "flash-attention-4", "absent": "flash_attn.cute"}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_mask_of_a_choice_is_the_exact_selection():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 64, heads, 16, generator=generator) for heads in (3, 3, 3))
    choice = top1_chunk_choice(q, k, chunk=16)[..., 0].mT.contiguous()
    mask = choice_mask(choice, 16)
    found = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask).transpose(1, 2)
    torch.testing.assert_close(found, top1_chunk(q, k, v, chunk=16), rtol=1e-5, atol=1e-5)
    pairs = torch.zeros(2, 3, 64, 4, dtype=torch.bool).scatter(3, choice.clamp(min=0).long()[..., None], True)
    needed = pairs.unflatten(2, (4, 16)).any(3) | torch.eye(4, dtype=torch.bool)
    needed[:, :, 0] = torch.tensor([True, False, False, False])
    assert torch.equal(mask.to_dense().bool(), needed)


@requires_gpu[0]
@requires_gpu[1]
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of PyTorch's own compiler
def test_on_a_gpu_peers_that_are_installed_compute_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    device = torch.device("cuda")
    compared = [op_peers.attention_peers(12, 64, 2048, device), op_peers.delta_peers(2048, device)]
    compared += [op_peers.kda_peers(2048, device), op_peers.sparse_peers(2048, device)]
    rows = [row for one in compared for row in measure(one, 3, device)]
    assert all(row["differs"] < 0.02 for row in rows if "differs" in row), rows
    assert any("flex" in row["op"] and "differs" in row for row in rows), rows


def test_absent_peers_are_said_in_one_line(monkeypatch: pytest.MonkeyPatch):
    found = {"peers": [{"op": "a"}], "absent": {"b": "b.ops", "c": "c"}, "complete": True}
    monkeypatch.setattr("basecap.bench.ops.run", lambda **options: found)
    done = CliRunner().invoke(app, ["bench", "ops", "--device", "cpu", "--table", "peers"])
    assert done.exit_code == 0 and "not installed, so not measured: b (b.ops), c (c)." in done.output
