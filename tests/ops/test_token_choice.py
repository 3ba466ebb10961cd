"""The choice of tokens and the indexer's loss against their definitions in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops.token_choice import (
    best,
    choose_by_index,
    choose_by_mass,
    index_divergence,
    index_scores,
    mass,
    operators,
    reference,
)

#: Rows, tokens of more than one block, tokens chosen; heads of the indexer and their size; of attention.
B, T, TOP = 2, 150, 20
SEGMENTS = (torch.arange(T) >= torch.tensor([[40], [131]])).long()
packings = pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)), dtype=torch.float64).to(dtype)


def index(length: int = T) -> list[Tensor]:
    """Return queries, keys and weights of three heads."""
    return [draw(B, length, 3, 8), draw(B, length, 8, seed=1), draw(B, length, 3, seed=2)]


def heads(length: int = T) -> list[Tensor]:
    """Return queries of four heads and keys of two."""
    return [draw(B, length, 4, 8, seed=3), draw(B, length, 2, 8, seed=4)]


def test_of_equal_scores_the_latest_are_chosen():
    scores = torch.tensor([[[0.0, 2.0, 0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 3.0, 3.0, 3.0]]])
    seen = torch.tensor([[[True] * 5 + [False], [True, True, False, False, False, False]]])
    for choose in (best, reference.chosen):
        assert choose(scores, seen, 4).int().tolist() == [[[0, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]]]
        assert choose(scores, seen, 1).int().tolist() == [[[0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]]


def test_scores_and_mass_are_those_of_all_heads():
    q, k, weights = index(9)
    expected = sum(weights[:, :, i, None] * (q[:, :, i] @ k.mT).relu() for i in range(3))
    torch.testing.assert_close(index_scores(q, k, weights), expected)
    torch.testing.assert_close(reference.index_scores(q, k, weights), expected)
    q, k = heads(9)
    seen = reference.seen(q)
    one_by_one = [q[:, :, h] @ k[:, :, h // 2].mT / 8**0.5 for h in range(4)]
    expected = sum(x.masked_fill(~seen, -torch.inf).softmax(-1) for x in one_by_one) / 4
    torch.testing.assert_close(mass(q, k, seen), expected)
    torch.testing.assert_close(reference.mass(q, k, seen), expected)


@packings
def test_choices_are_the_definition(segments):
    seen = reference.seen(draw(B, T), segments)
    expected = reference.chosen(reference.index_scores(*index()), seen, TOP)
    assert torch.equal(choose_by_index(*index(), TOP, segments=segments), expected)
    assert torch.equal(choose_by_index(*index(), 2 * T, segments=segments), seen)
    expected = reference.chosen(reference.mass(*heads(), seen), seen, TOP)
    assert torch.equal(choose_by_mass(*heads(), TOP, segments=segments), expected)
    assert expected.sum(-1).max() == TOP


@packings
@pytest.mark.parametrize("over", ["visible", "chosen"])
def test_the_loss_and_its_gradients_are_the_definition(over, segments):
    chosen = choose_by_mass(*heads(), TOP, segments=segments) if over == "chosen" else None
    seen = reference.seen(draw(B, T), segments) if chosen is None else chosen
    found = []
    for loss in (
        partial(index_divergence, chosen_BTT=chosen, segments=segments),
        partial(reference.divergence, seen_BTT=seen),
    ):
        leaves = [x.requires_grad_() for x in index()]
        value = loss(*leaves, *heads())
        found.append([value, *torch.autograd.grad(3 * value, leaves)])
    torch.testing.assert_close(*found)
    with torch.no_grad():
        assert torch.equal(index_divergence(*index(), *heads(), chosen_BTT=chosen, segments=segments), found[0][0])


def test_autocast_changes_nothing_and_a_compiled_graph_has_one_node_for_each():
    half = [x.bfloat16() for x in (*index(), *heads())]
    leaves = [x.requires_grad_() for x in half[:3]]
    nodes: list[str] = []

    def backend(graph, _):
        nodes.extend(node.target.__name__ for node in graph.graph.nodes if "basecap" in str(node.target))
        return graph

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        chosen = choose_by_index(*given[:3], TOP) & choose_by_mass(*given[3:], TOP)
        return chosen, index_divergence(*given)

    found = []
    for function in (run, torch.compile(run, backend=backend, fullgraph=True)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            chosen, loss = function(*leaves, *half[3:])
        found.append([chosen, loss, *torch.autograd.grad(loss, leaves)])
    assert torch.equal(found[0][0], run(*leaves, *half[3:])[0]) and found[0][1] == run(*leaves, *half[3:])[1]
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert sorted(nodes) == ["choose_by_index.default", "choose_by_mass.default", "index_divergence.default"]
    assert loss.dtype == torch.float32 and found[0][2].dtype == torch.bfloat16


def test_operators():
    leaves, checks = [x.requires_grad_() for x in index(9)], ("test_schema", "test_autograd_registration")
    for operator, given in (
        (operators.choose_by_index, (*index(9), None, 4, "eager")),
        (operators.choose_by_mass, (*heads(9), None, 4, "eager")),
        (operators.diverge, (*leaves, heads(9), None, None, True, "eager")),
        (operators.diverge, (*index(9), heads(9), None, None, False, "eager")),
    ):
        found = torch.library.opcheck(operator.overload, given, test_utils=(*checks, "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, w, *h: choose_by_index(q[0], k, w, 4), r"index_q .* must be \[B, T, I, J\]"),
        (lambda q, k, w, *h: choose_by_index(q, k[:, 1:], w, 4), r"index_k .* must be \[2, 9, 8\]"),
        (lambda q, k, w, *h: choose_by_index(q, k.float(), w, 4), r"index_k .*torch.float32, must be .* torch.float64"),
        (lambda q, k, w, *h: choose_by_index(q, k, w[..., 1:], 4), r"weights .* must be \[B, T, I\]"),
        (lambda q, k, w, *h: choose_by_index(q, k, w, 0), "top must be an integer of at least 1, not 0"),
        (lambda q, k, w, *h: choose_by_mass(*h, 1.5), "top must be an integer of at least 1, not 1.5"),
        (lambda q, k, w, *h: choose_by_mass(h[0][..., 1:], h[1], 4), "must have the B, T and K of q"),
        (lambda q, k, w, *h: choose_by_mass(*h, 4, segments=SEGMENTS), r"segments .* must be \[B, T\]"),
        (lambda q, k, w, *h: index_divergence(q, k, w, *(x[:, 1:] for x in h)), "those of index_q"),
        (lambda q, k, w, *h: index_divergence(q, k, w, *h, chosen_BTT=torch.ones(2, 9, 9)), "chosen must be integers"),
        (
            lambda q, k, w, *h: index_divergence(q, k, w, *h, chosen_BTT=torch.ones(2, 9, 8).bool()),
            r"chosen .* must be bool \[2, 9, 9\]",
        ),
    ],
)
def test_bad_inputs_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        change(*index(9), *heads(9))
