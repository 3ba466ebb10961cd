"""The list of releases that are wrong on some GPUs, with made-up releases and cards."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from basecap.bench import peers
from basecap.cli import app
from basecap.errors import ConfigError
from basecap.ops import known_bad
from basecap.ops.known_bad import FLA_DELTA, KNOWN_BAD, PIPELINES
from basecap.ops.ssd.triton_kernels.launch import _stages
from basecap.testing import check_all

GPU = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A Blackwell GPU with Triton 3.6.0; its numbers may be changed."""
    known_bad.known_bad_on.cache_clear()
    monkeypatch.setattr(known_bad, "_installed", lambda: {"triton": "3.6.0"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    room = SimpleNamespace(shared_memory_per_multiprocessor=2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: room)
    yield monkeypatch
    known_bad.known_bad_on.cache_clear()
    known_bad.in_doubt_on.cache_clear()


@pytest.mark.parametrize(
    ("fla", "triton", "card", "words"),
    [
        ("0.6.0", "3.7.1", 9, None),
        ("0.6.1", "3.8.0+git1", 9, None),
        ("0.6.0", "3.6.0", 8, None),
        ("0.6", "3.3.1", 9, None),
        ("0.6.0", "3.6.0", 9, "triton 3.6.0 computes wrong gradients"),
        ("0.6.0", "3.4", 9, "triton 3.4 computes wrong gradients"),
        ("0.6.0", "3.7.0", 9, "install triton 3.7.1 or newer"),
        ("0.6.0", "3.7.0", 10, "computes NaN gradients"),
        ("0.6.0", "3.7.1", 10, None),
        ("0.5.2", "3.7.1", 8, "fla-core 0.5.2 is too old"),
    ],
)
def test_releases_are_refused_by_card(fla: str, triton: str, card: int, words: str | None):
    found = known_bad.known_bad({"fla-core": fla, "triton": triton}, card).get(FLA_DELTA)
    assert found == words or words in found


def test_every_entry_has_a_source_and_holds_for_its_first_release():
    for pair in KNOWN_BAD:
        releases, card = {pair.package: pair.first}, pair.card or 8
        found, others = known_bad.known_bad, known_bad.in_doubt
        if pair.doubted:
            found, others = others, found
        assert pair.source in found(releases, card)[pair.concerns]
        assert others(releases, card) == found({}, card) == {}


@pytest.mark.parametrize(
    ("assembler", "triton", "card", "doubted"),
    [
        ("12.8", "3.7.1", 9, True),
        ("13.1.80", "3.7.1", 9, True),
        ("13.3", "3.7.1", 9, False),  # as TRITON_PTXAS_PATH may name
        ("12.8", "3.7.0", 9, False),  # known to be wrong
        ("13.1", "3.7.1", 10, False),
    ],
)
def test_kernels_that_an_old_assembler_may_break_are_in_doubt(assembler: str, triton: str, card: int, doubted: bool):
    releases = {"fla-core": "0.6.0", "triton": triton, "ptxas": assembler}
    found = known_bad.in_doubt(releases, card)
    assert [*found] == [FLA_DELTA] * doubted
    assert all(f"ptxas {assembler} may make wrong code of the delta rules" in words for words in found.values())


def test_triton_says_which_assembler_it_uses():
    assert re.match(r"\d+\.\d+", known_bad._assembler(9)["ptxas"])


@pytest.mark.parametrize("name", ["triton", "pytorch-triton", "triton-windows"])
def test_triton_is_known_by_every_name_that_it_is_installed_under(name: str, monkeypatch: pytest.MonkeyPatch):
    def version(package: str) -> str:
        if package != name:
            raise PackageNotFoundError(package)
        return "3.6.0"

    monkeypatch.setattr(known_bad, "version", version)
    assert known_bad._installed() == {"triton": "3.6.0"}


def test_nothing_loads_ahead_where_that_is_wrong(card: pytest.MonkeyPatch):
    v = SimpleNamespace(is_cuda=True, device=GPU, element_size=lambda: 2)
    assert PIPELINES in known_bad.known_bad_on(GPU)
    assert _stages(v, 64, 64) == 1
    known_bad.known_bad_on.cache_clear()
    card.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert _stages(v, 64, 64) == 3


@pytest.mark.usefixtures("card")
def test_a_peer_is_refused_by_name():
    wrong = {peer.stem: peer for peer in peers.PEERS if peer.kernels == FLA_DELTA}
    assert [*wrong] == ["DeltaNet", "GatedDeltaNet"]
    for peer in wrong.values():
        with pytest.raises(ConfigError, match=r"^triton 3\.6\.0 fails to compile, or computes NaN gradients"):
            peers.refuse_known_bad(peer, GPU)
    for peer in set(peers.PEERS) - {*wrong.values()}:
        peers.refuse_known_bad(peer, GPU)


@pytest.mark.usefixtures("card")
def test_check_prints_what_this_gpu_is_and_what_is_known_to_be_wrong_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_all, "check_all", lambda *arguments, **options: [])
    monkeypatch.setattr("basecap.system.environment.choose_device", lambda name: GPU)
    monkeypatch.setattr("basecap.testing.check_op.unknown_card", lambda device: f"no kernel was tuned on {device}")
    done = CliRunner().invoke(app, ["check"])
    assert done.stderr.splitlines()[0] == "no kernel was tuned on cuda:0."
    said = next(line for line in done.stderr.splitlines() if "known to be wrong" in line)
    assert done.exit_code == 0
    assert said.startswith("known to be wrong with the installed releases on this GPU: triton 3.6.0 ")
    assert "; triton 3.6.0 fails to compile, or computes NaN gradients of, the delta rules" in said
    assert "state-spaces/mamba issue 938" in said and "in doubt" not in done.stderr
    monkeypatch.setattr(known_bad, "_installed", lambda: {"fla-core": "0.6.0", "triton": "3.7.1"})
    monkeypatch.setattr(known_bad, "_assembler", lambda card: {"ptxas": "12.8"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    known_bad.known_bad_on.cache_clear()
    known_bad.in_doubt_on.cache_clear()
    said = CliRunner().invoke(app, ["check"]).stderr
    assert "in doubt with the installed releases on this GPU, but used: ptxas 12.8 may make wrong code of" in said
    assert "known to be wrong" not in said
