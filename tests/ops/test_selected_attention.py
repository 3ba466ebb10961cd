"""Attention to chosen blocks of keys against its definition in float64; tiles that no query has chosen are left out."""

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from basecap.errors import ConfigError
from basecap.ops.attention import attention
from basecap.ops.selected_attention import eager, flex_kernels, influence, reference, selected_attention
from basecap.testing.tolerance import assert_as_accurate

T = 150
SEGMENTS = (torch.arange(T) >= torch.tensor([[40], [131]])).long()


def positions(segments, length=T):
    if segments is None:
        return torch.arange(length).expand(2, -1)
    return torch.stack([torch.cat([torch.arange(n) for n in row.bincount().tolist()]) for row in segments])


def inputs(length=T, block=8, segments=None, K=8, dtype=torch.float64):
    """Four query heads, two key heads; of each pair of query heads one choice."""
    generator = torch.Generator().manual_seed(0)
    heads = (torch.randn(2, length, n, K, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    q, k, v = (x.to(dtype).requires_grad_() for x in heads)
    blocks = positions(segments, length) // block
    chosen = torch.rand(2, length, 2, -(-length // block), generator=generator) < 0.4
    return q, k, v, chosen.scatter(-1, blocks[..., None, None].expand(-1, -1, 2, 1), True), blocks


def loop(q, k, v, chosen, blocks, segments):
    """The definition, one query at a time."""
    rows = []
    for b in range(2):
        for t in range(q.shape[1]):
            for h in range(4):
                own = [s for s in range(t + 1) if segments is None or segments[b, s] == segments[b, t]]
                read = [s for s in own if chosen[b, t, h // 2, blocks[b, s]]]
                scores = k[b, read, h // 2] @ q[b, t, h] / q.shape[3] ** 0.5
                rows.append(scores.softmax(0) @ v[b, read, h // 2])
    return torch.stack(rows).view(q.shape)


@pytest.mark.parametrize("segments", [None, SEGMENTS[:, 35:54] - SEGMENTS[:, 35:36]], ids=["whole", "packed"])
def test_reference_is_the_definition(segments):
    given = inputs(19, 4, segments)
    torch.testing.assert_close(reference.attention(*given, 8**-0.5, segments), loop(*given, segments))


@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
def test_outputs_and_gradients(segments, block):
    given = inputs(T, block, segments)
    results = [selected_attention(*given, segments=segments), reference.attention(*given, 8**-0.5, segments)]
    torch.testing.assert_close(*results)
    grads = (torch.autograd.grad(o.square().sum(), given[:3]) for o in results)
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected)
    values = given[2].repeat_interleave(2, dim=2)
    factors = influence(*given[:2], *given[3:], segments=segments).whole()
    torch.testing.assert_close(torch.einsum("bhts,bshv->bthv", factors, values), results[1])


def test_every_block_is_attention():
    q, k, v, chosen, blocks = inputs()
    torch.testing.assert_close(selected_attention(q, k, v, torch.ones_like(chosen), blocks), attention(q, k, v))


class Computes(TorchDispatchMode):
    """Counts operations that are no views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_product_takes_four_operations():
    """The caller in Python waits for each: the mask takes three, the product the fourth."""
    counts = []
    for products in (2, 3):
        *heads, chosen, blocks = (x.detach() for x in inputs(products * eager.QUERIES, K=16, dtype=torch.float32))
        with torch.no_grad(), Computes() as computes:
            eager.attention(*heads, chosen.repeat_interleave(2, dim=2), blocks, 0.25, None)
        counts.append(computes.count)
    assert counts[1] - counts[0] == 4


def test_no_operations_stand_around_what_is_compiled(monkeypatch):
    given, taken = inputs(128, 32, K=16, dtype=torch.float32), []
    monkeypatch.setattr(flex_kernels, "compiled", lambda function: lambda *args: taken.extend(args))
    with Computes() as computes:
        flex_kernels.attention(*given, 0.25, None)
    assert computes.count == 0 and [id(x) for x in taken[:5]] == [id(x) for x in given]


def test_tiles_of_the_kernel_are_those_that_a_query_has_chosen():
    chosen, blocks = torch.zeros(1, 512, 2, 32, dtype=torch.bool), torch.arange(512)[None] // 16
    chosen[0, 300, 1, 9] = chosen[0, 511, 0, 0] = True
    found = flex_kernels.tiles(chosen, blocks, 2)
    assert found.nonzero().tolist() == [[0, 0, 3, 0], [0, 1, 3, 0], [0, 2, 2, 1], [0, 3, 2, 1]]
    mask = flex_kernels.block_mask(1, 512, None, None, torch.device("cpu"), found, lambda b, h, t, s: t == s)
    assert mask.to_dense().nonzero().tolist() == found.nonzero().tolist()
    assert mask.full_kv_num_blocks is None  # every tile asks


def test_in_compiled_code_the_mask_refers_to_a_copy_of_the_choice():
    """Inductor would read a choice made by scatter without what was written; `mixers/test_nsa.py` runs its code."""
    *heads, chosen, blocks = (x.detach() for x in inputs(128, 32, K=16, dtype=torch.float32))
    places = chosen.int().argsort(dim=-1, descending=True, stable=True)

    def attend(q, k, v, places, exists, blocks):
        chosen = torch.zeros_like(exists).scatter(-1, places, exists)
        return flex_kernels.attention(q, k, v, chosen, blocks, 0.25, None)

    graphs = list[torch.fx.GraphModule]()
    torch.compiler.reset()
    with torch.no_grad():
        run = torch.compile(attend, fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or graph)
        found = run(*heads, places, chosen.gather(-1, places), blocks)
    torch.testing.assert_close(found, reference.attention(*heads, chosen, blocks, 0.25))
    (called,) = (node for node in graphs[0].graph.nodes if node.target is flex_attention)
    operators = {node.target for node in called.args[-1] if node.op == "call_function"}
    assert operators == {flex_kernels.copy_choice.overload}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, c, n: selected_attention(q, k, v, c.float(), n), "chosen must be integers"),
        (lambda q, k, v, c, n: selected_attention(q, k, v, c[:, 1:], n), r"must be bool \[B, T, C, M\] with B, T"),
        (lambda q, k, v, c, n: selected_attention(q, k, v, c[:, :, [0, 0, 0]], n), "not a multiple of the 3 choices"),
        (lambda q, k, v, c, n: selected_attention(q, k, v, c, n.int()), r"blocks .* must be int64 \[B, T\]"),
        (lambda q, k, v, c, n: selected_attention(q, k[:, 1:], v, c, n), "must have the B, T and K of q"),
        (lambda q, k, v, c, n: selected_attention(q, k, v, c, n, scale=0.0), "scale must be positive"),
        (lambda q, k, v, c, n: selected_attention(q, k, v, c, n, segments=SEGMENTS), "segments"),
    ],
)
def test_bad_inputs_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        change(*inputs(9, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("block", [1, 32])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own, as is the next
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_kernels_on_a_gpu(block, packed, dtype):
    torch.compiler.reset()
    segments = (torch.arange(512) >= torch.tensor([[40], [300]])).long() if packed else None
    *heads, chosen, blocks = (x.detach().cuda() for x in inputs(512, block, segments, K=64, dtype=dtype))
    segments = segments.cuda() if packed else None
    low = [x.requires_grad_() for x in heads]
    high = [x.detach().double().requires_grad_() for x in low]
    true = reference.attention(*high, chosen, blocks, 0.125, segments)
    plain = eager.attention(*low, chosen, blocks, 0.125, segments)
    ours = selected_attention(*low, chosen, blocks, scale=0.125, segments=segments)
    do = torch.randn(true.shape, generator=torch.Generator().manual_seed(1)).cuda()
    truth, eagers, kernels = (
        [o, *torch.autograd.grad(o, x, do.to(o.dtype))] for o, x in ((true, high), (plain, low), (ours, low))
    )
    for result in zip(("o", "dq", "dk", "dv"), kernels, eagers, truth, strict=True):
        assert_as_accurate(*result)
