"""Causal attention against its definition in float64: windows, ALiBi, grouped heads, packed segments, gradients."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from basecap.errors import ConfigError
from basecap.ops._kept import Kept
from basecap.ops.attention import attention, attention_step, eager, entropy, flex_kernels, influence, reference
from basecap.testing.tolerance import assert_as_accurate

OPTIONS = [
    {},
    {"window": 1},
    {"window": 5},
    {"window": 16},
    {"window": 30},
    {"window": 400},
    {"slopes": True},
    {"slopes": True, "window": 7},
    {"segments": True},
    {"segments": True, "window": 6},
    {"segments": True, "window": 40},
    {"segments": True, "slopes": True},
    {"sinks": True},
    {"sinks": True, "window": 6, "segments": True},
    {"sinks": True, "slopes": True},
]


def inputs(T=37, H=4, G=2, K=8, V=6, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, T, H, K), (2, T, G, K), (2, T, G, V))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def spelled_out(options, T=37, H=4):
    """Return the options with the tensors that True stands for."""
    cuts = torch.tensor([[1, 9, 20], [4, 5, 30]])
    made = dict(options)
    if "slopes" in options:
        made["slopes"] = 2.0 ** -torch.arange(1, H + 1)
    if "segments" in options:
        made["segments"] = (torch.arange(T)[None, :, None] >= cuts[:, None]).sum(-1)
    if "sinks" in options:
        made["sinks"] = torch.linspace(-2.0, 2.0, H, dtype=torch.float64).requires_grad_()
    return made


def loop(q, k, v, scale, window=None, slopes=None, segments=None, sinks=None):
    """The definition, one query at a time."""
    B, T, H, _ = q.shape
    rows = []
    for b in range(B):
        for t in range(T):
            seen = [
                s
                for s in range(t + 1)
                if (window is None or t - s < window) and (segments is None or segments[b, s] == segments[b, t])
            ]
            for h in range(H):
                g = h // (H // k.shape[2])
                scores = torch.stack([q[b, t, h] @ k[b, s, g] * scale for s in seen])
                if slopes is not None:
                    scores = scores - slopes[h] * (t - torch.tensor(seen))
                least = 0.0 if sinks is None else sinks[h].exp()
                rows.append(scores.exp() @ v[b, seen, g] / (scores.exp().sum() + least))
    return torch.stack(rows).view(B, T, H, -1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reference_is_the_definition(options):
    q, k, v = inputs(T=23)
    made = spelled_out(options, T=23)
    torch.testing.assert_close(reference.attention(q, k, v, 0.3, **made), loop(q, k, v, 0.3, **made))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("T", [1, 2, 15, 37])
def test_outputs_and_gradients(options, T):
    q, k, v = inputs(T=T)
    made = spelled_out(options, T=T)
    expected = reference.attention(q, k, v, 8**-0.5, **made)
    actual = attention(q, k, v, **made)
    do = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(actual, expected)
    wanted = [q, k, v, *([made["sinks"]] if "sinks" in made else [])]
    for one, other in zip(
        torch.autograd.grad(actual, wanted, do), torch.autograd.grad(expected, wanted, do), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_as_accurate_as_the_definition(options, dtype):
    low = inputs(T=130, dtype=dtype)
    made = {key: x.to(dtype) if key == "sinks" else x for key, x in spelled_out(options, T=130).items()}
    true = reference.attention(*(x.detach().double() for x in low), 8**-0.5, **made)
    plain = reference.attention(*low, 8**-0.5, **made)
    assert_as_accurate("o", attention(*low, **made), plain, true)


def test_window_that_covers_everything_is_full_attention():
    q, k, v = inputs(T=20)
    assert torch.equal(attention(q, k, v, window=20), attention(q, k, v))


@pytest.mark.parametrize("autocast", [False, True])
def test_alibi_keeps_its_precision_in_bfloat16(autocast):
    q, k, v = (torch.zeros(1, 600, 1, 16, dtype=torch.bfloat16) for _ in range(3))
    v[0, :, 0, 0] = torch.arange(600) % 2
    slopes = torch.tensor([1 / 300])
    true = reference.attention(q.double(), k.double(), v.double(), 1.0, slopes=slopes)
    with torch.autocast("cpu", enabled=autocast):
        o = attention(q, k, v, slopes=slopes)
    error = (o.double() - true).abs().max()
    assert error <= torch.finfo(torch.bfloat16).eps


def test_slopes_of_fewer_bits_leave_the_others_their_digits():
    q, k, v = inputs(T=300)
    slopes = torch.tensor([0.3, 0.1, 0.01, 0.7])
    expected = reference.attention(q, k, v, 8**-0.5, slopes=slopes)
    torch.testing.assert_close(attention(q, k, v, slopes=slopes), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
def test_compiled_code_takes_any_number_of_heads(window):
    torch.compiler.reset()  # else the heads of other tests may be those for which compiled code is already there
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    step = torch.compile(attention_step, fullgraph=True, backend="eager")
    for heads, groups in ((2, 2), (6, 3)):
        q, k, v = (x.detach() for x in inputs(T=20, H=heads, G=groups))
        torch.testing.assert_close(compiled(q, k, v, window=window), attention(q, k, v, window=window))
        torch.testing.assert_close(step(q[:, -1:], k, v), attention_step(q[:, -1:], k, v))


def test_memory_of_a_window_is_linear(monkeypatch):
    sizes = []
    dot = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        eager.F,
        "scaled_dot_product_attention",
        lambda *args, **options: sizes.append(args[3].numel()) or dot(*args, **options),
    )
    q, k, v = inputs(T=512)
    attention(q, k, v, window=16)
    assert sizes == [2 * 512 * 32]


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, 1.0, -1.0, 3.0])])
@pytest.mark.parametrize("bias", [False, True])
def test_steps_are_the_last_rows(bias, sinks):
    q, k, v = inputs()
    slopes = 2.0 ** -torch.arange(1, 5) if bias else None
    expected = reference.attention(q, k, v, 8**-0.5, slopes=slopes, sinks=sinks)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(2))
    bias_HS = None if slopes is None else -slopes[:, None] * (36 - order)
    step = attention_step(q[:, -1:], k[:, order], v[:, order], bias_HS=bias_HS, sinks=sinks)
    torch.testing.assert_close(step, expected[:, -1:])
    age = torch.arange(32, 37)[:, None] - order
    bias_BHTS = None if slopes is None else (-slopes[:, None, None] * age).expand(len(q), -1, -1, -1)
    seen = {"bias_HS": bias_BHTS, "visible_BS": (age >= 0).expand(len(q), -1, -1)}
    steps = attention_step(q[:, -5:], k[:, order], v[:, order], sinks=sinks, **seen)
    torch.testing.assert_close(steps, expected[:, -5:])


def test_entropy_runs_from_certainty_to_uniform():
    q, k, _ = inputs()
    uniform = entropy(influence(torch.zeros_like(q), k, scale=1.0).whole())
    torch.testing.assert_close(uniform, torch.arange(1, 38, dtype=torch.float64).log().expand_as(uniform))
    assert entropy(influence(q, k, scale=1e4).whole()).abs().max() < 1e-3
    mean = [entropy(influence(q, k, scale=scale).whole()).mean().item() for scale in (0.1, 1.0, 10.0)]
    assert mean == sorted(mean, reverse=True)
    assert all(0 <= x <= math.log(37) for x in mean)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: attention(q, k, v, window=0), "window must be an integer of at least 1, not 0"),
        (lambda q, k, v: attention(q, k, v, window=2.5), "window must be an integer of at least 1, not 2.5"),
        (lambda q, k, v: attention(q, k, v, scale=math.nan), "scale must be positive and finite, not nan"),
        (lambda q, k, v: attention(q, k, v, scale=0.0), "scale must be positive and finite, not 0.0"),
        (lambda q, k, v: attention_step(q[:, :1], k, v, scale=-1.0), "scale must be positive and finite, not -1.0"),
        (lambda q, k, v: attention(q[:, :, :3], k, v), "3 query heads are not a multiple of 2"),
        (lambda q, k, v: attention(q, k, v[:, :, :1]), "must be"),
        (lambda q, k, v: attention(q, k[..., :4], v), "must be"),
        (lambda q, k, v: attention(q[0], k[0], v[0]), "must be"),
        (lambda q, k, v: attention(q, k, v[..., 0]), "must be"),
        (lambda q, k, v: attention(q, k[:, :, :0], v[:, :, :0]), "at least one head"),
        (lambda q, k, v: attention(q, k[:, :5], v[:, :5]), "k has 5 tokens where q has 37"),
        (lambda q, k, v: attention(q, k.float(), v), "share a dtype"),
        (lambda q, k, v: attention(q, k, v, slopes=torch.ones(2)), "one per query head"),
        (lambda q, k, v: attention(q, k, v, sinks=torch.ones(2)), r"sinks \[2\] must be one per query head, \[4\]"),
        (lambda q, k, v: attention_step(q[:, :1], k, v, sinks=torch.ones(2)), "one per query head"),
        (lambda q, k, v: attention(q, k, v, slopes=[1.0] * 4), r"slopes must be a torch\.Tensor, not list"),
        (lambda q, k, v: attention(q, k, v, segments=torch.zeros(2, 5).long()), r"segments \(2, 5\) must be"),
        (lambda q, k, v: attention_step(q[:, :1], k[1:], v[1:]), "must be"),
        (lambda q, k, v: attention_step(q, k, v), "q has 37 tokens, which do not all see the same keys; give visible"),
        (lambda q, k, v: attention_step(q[:, :1], k, v, bias_HS=torch.ones(37)), r"bias \[37\] must be \[H, S\]"),
    ],
)
def test_bad_inputs_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        change(*inputs())


def test_full_attention_is_a_product_between_transposes():
    """A caller in Python waits for each node of autograd."""
    q, k, v = (torch.randn(1, 16, 2, 8, requires_grad=True) for _ in range(3))
    last = attention(q, k, v).grad_fn
    ((product, _),) = last.next_functions
    first = [node for node, _ in product.next_functions]
    assert "ScaledDotProduct" in product.name()
    assert {node.name() for node in (last, *first)} == {"TransposeBackward0"}
    assert all(node.next_functions[0][0].variable is x for node, x in zip(first, (q, k, v), strict=True))


@pytest.mark.parametrize("window", [None, 1, 128, 129, 200, 256, 257])
@pytest.mark.parametrize("packed", [False, True])
def test_tiles_of_the_kernel_are_those_with_visible_pairs(window, packed):
    T, cuts = 768, torch.tensor([[100, 128, 300], [256, 512, 767]])
    segments = (torch.arange(T)[None, :, None] >= cuts[:, None]).sum(-1) if packed else None
    mask = flex_kernels.block_mask(2, T, window, segments, torch.device("cpu"))
    t = torch.arange(T)
    pairs = (t[:, None] >= t) & (t[:, None] - t < (window or T))
    pairs = pairs.expand(2, T, T) if segments is None else pairs & (segments[:, :, None] == segments[:, None])
    tiles = pairs.unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).transpose(2, 3)
    for number, columns, expected in (
        (mask.kv_num_blocks, mask.kv_indices, tiles.any(-1).any(-1) & ~tiles.all(-1).all(-1)),
        (mask.full_kv_num_blocks, mask.full_kv_indices, tiles.all(-1).all(-1)),
    ):
        listed = torch.zeros_like(expected)
        for b in range(2):
            for i in range(T // 128):
                listed[b, i, columns[b, 0, i, : number[b, 0, i]]] = True
        assert torch.equal(listed, expected)


def test_the_last_tile_of_the_kernel_may_be_cut():
    length, window = 700, 256
    mask = flex_kernels.block_mask(1, length, window, None, torch.device("cpu"))
    t = torch.arange(length)
    assert mask.seq_lengths == (length, length)
    visible = mask.mask_mod(0, 0, t[:, None], t[None, :])
    assert torch.equal(visible, (t[:, None] >= t) & (t[:, None] - t < window))
    blocks = visible.new_zeros(768, 768)
    blocks[:length, :length] = visible
    blocks = blocks.unflatten(0, (6, 128)).unflatten(2, (6, 128))
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks.any(3).any(1))
    full = torch.zeros(6, 6, dtype=torch.bool)
    for row in range(6):
        full[row, mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]]] = True
    assert torch.equal(full[:5], blocks.all(3).all(1)[:5])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own, as is the next
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_kernels_on_a_gpu(options, dtype):
    torch.compiler.reset()
    T = 256
    low = [x.detach().cuda().requires_grad_() for x in inputs(T=T, K=64, V=64, dtype=dtype)]
    made = {k: x.detach().cuda() if isinstance(x, torch.Tensor) else x for k, x in spelled_out(options, T=T).items()}
    high = [x.detach().double().requires_grad_() for x in low]
    true = reference.attention(*high, 0.125, **made)
    plain = eager.attention(*low, 0.125, *(made.get(name) for name in ("window", "slopes", "segments", "sinks")))
    ours = attention(*low, scale=0.125, **made)
    do = torch.randn(true.shape, generator=torch.Generator().manual_seed(1)).cuda()
    truth, eagers, kernels = (
        [o, *torch.autograd.grad(o, x, do.to(o.dtype))] for o, x in ((true, high), (plain, low), (ours, low))
    )
    results = [*zip(("o", "dq", "dk", "dv"), kernels, eagers, truth, strict=True)]
    for name, fast, slow, exact in (result for result in results if result[3].any()):
        assert_as_accurate(name, fast, slow, exact)
    # one key in sight: what cancels on paper, and by luck in plain PyTorch, leaves rounding errors of do . v
    size = (do.abs() * low[2].abs().repeat_interleave(2, dim=2)).sum(-1).max()
    for name, fast, _, exact in results:
        assert exact.any() or fast.abs().max() <= 8 * torch.finfo(dtype).eps * size, name


@pytest.mark.parametrize(
    ("allowed", "masked", "G", "cudnn"),
    [
        (None, True, 4, False),
        (None, False, 2, False),
        (None, True, 2, True),
        ([SDPBackend.CUDNN_ATTENTION], True, 4, True),
    ],
)
def test_steps_from_python_leave_out_kernels_with_a_plan_for_each_length(monkeypatch, allowed, masked, G, cudnn):
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **options):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    with FakeTensorMode(), sdpa_kernel(allowed or [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
        q, k = (torch.empty(2, H, T, 8, device="cuda", dtype=torch.bfloat16) for T, H in ((1, 4), (9, G)))
        mask = torch.empty(2, 1, 1, 9, device="cuda", dtype=torch.bool) if masked else None
        assert eager.over_cache(q, k, k, mask, 1.0, G != 4).shape == q.shape
        assert seen == [cudnn] and torch.backends.cuda.cudnn_sdp_enabled()


def test_lists_of_tiles_are_contiguous_whatever_the_tiles_are():
    """FlexAttention's kernels on a GPU read them so; its own PyTorch code does not show it."""
    tiles = (torch.arange(24).view(2, 4, 3) % 5 < 3).transpose(1, 2)[..., None, :].expand(2, 3, 4, 4)
    count, columns = flex_kernels._listed(tiles)
    assert count.is_contiguous() and columns.is_contiguous()
    for row, n, places in zip(tiles.flatten(0, 2), count.flatten(), columns.flatten(0, 2), strict=True):
        assert places[:n].tolist() == row.nonzero().flatten().tolist()


def test_a_mask_of_sizes_alone_is_made_once(monkeypatch: pytest.MonkeyPatch):
    masks = flex_kernels._MASKS
    monkeypatch.setattr(flex_kernels, "_MASKS", Kept(masks.make, masks.tensors))
    given, run = [], lambda q, k, v, mask, *_: given.append(mask) or v
    monkeypatch.setattr(flex_kernels, "compiled", lambda function: run)
    q, k, v = (x.detach() for x in inputs(T=256, dtype=torch.float32))
    with torch.inference_mode():
        for _ in range(2):
            flex_kernels.attention(q, k, v, 0.5, 128, None, None)
    flex_kernels.attention(q, k, v, 0.5, 128, None, torch.zeros(len(q), 256, dtype=torch.int64))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        flex_kernels.attention(*(mode.from_tensor(x) for x in (q, k, v)), 0.5, 128, None, None)
    first, second, *others = given
    assert first is second and others == [None, None]  # these are made in compiled code
    assert not any(x is None or x.is_inference() for x in masks.tensors(first))


def test_tiles_of_a_mask_can_be_left_out():
    T, device = 512, torch.device("cpu")
    everything = flex_kernels.block_mask(2, T, None, None, device)
    some = torch.ones(2, 3, 4, 4, dtype=torch.bool).tril().triu(-1)
    mask = flex_kernels.block_mask(2, T, None, None, device, some)
    assert torch.equal(mask.to_dense().bool(), some & everything.to_dense().bool())
    assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 1, 1, 1]
