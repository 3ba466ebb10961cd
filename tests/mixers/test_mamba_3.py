"""Mamba-3: the paper's recurrence token by token, identity with Mamba-2, published sizes."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from basecap.errors import ConfigError
from basecap.mixers import LayerSpec
from basecap.mixers.mamba_2 import Mamba2
from basecap.mixers.mamba_3 import Mamba3
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.ops import _saved, keep_choice
from tests.mixers._built import draw, moved


def build(**options: object) -> Mamba3:
    return moved(Mamba3(Mamba3.Config(heads=2, state=8, **options), LayerSpec(hidden=12)), 0.3)


def inputs(T: int = 30) -> Tensor:
    return 2 * draw(2, T, 12, seed=1)


def by_token(mixer: Mamba3, u: Tensor) -> Tensor:
    """The recurrence as the official step has it: every head with its own state and phases, one token at a time."""
    H, K, V, A, R = mixer.heads, mixer.config.state, mixer.head_dim, mixer.angles, mixer.config.rank
    z, x, B, C, dt, rate, share, angle = (u @ mixer.in_proj.weight.T).split(mixer.parts, dim=-1)
    dt = F.softplus(dt + mixer.dt_bias)
    rate = F.softplus(rate) if mixer.config.rate == "softplus" else torch.where(rate >= 0, 1 + rate, 1 / (1 - rate))
    rate = rate.clamp(min=1e-4)
    share = torch.sigmoid(share) if mixer.config.trapezoid else torch.ones_like(dt)
    B, C = (part.unflatten(-1, (R, K)) for part in (B, C))
    B, C = (
        (part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-5) * gain)[:, :, None] + bias.view(H, R, K)
        for part, gain, bias in ((B, mixer.B_gain, mixer.B_bias), (C, mixer.C_gain, mixer.C_bias))
    )
    ones = u.new_ones(H, R, V)
    entering, gating, leaving = (ones, ones, ones) if R == 1 else (mixer.mimo_x, mixer.mimo_z, mixer.mimo_o)
    x, z, phase = x.unflatten(-1, (H, 1, V)), z.unflatten(-1, (H, 1, V)), u.new_zeros(len(u), H, 1, A)
    state, before, outputs = u.new_zeros(len(u), H, V, K), u.new_zeros(len(u), H, V, K), []
    for t in range(u.shape[1]):
        phase = phase + dt[:, t, :, None, None] * torch.tanh(angle[:, t, None, None]) * math.pi
        turn = torch.polar(torch.ones_like(phase), phase)

        def rotated(part: Tensor, turn: Tensor = turn) -> Tensor:
            pairs = torch.view_as_complex(part[..., : 2 * A].unflatten(-1, (A, 2)).contiguous())
            return torch.cat([torch.view_as_real(pairs * turn).flatten(-2), part[..., 2 * A :]], dim=-1)

        v = x[:, t] * entering  # [B, H, R, V]
        write = torch.einsum("bhrv,bhrk->bhvk", v, rotated(B[:, t]))
        step, decay = dt[:, t, :, None, None], torch.exp(-rate[:, t] * dt[:, t])[..., None, None]
        own = share[:, t, :, None, None]
        state = decay * state + (1 - own) * step * decay * before + own * step * write
        before = write
        read = torch.einsum("bhvk,bhrk->bhrv", state, rotated(C[:, t])) + mixer.D[:, None, None] * v
        outputs.append((read * F.silu(z[:, t] * gating) * leaving).sum(2))
    return torch.stack(outputs, dim=1).flatten(2) @ mixer.out_proj.weight.T


@pytest.mark.parametrize("options", [{}, {"rate": "heavy tail"}, {"trapezoid": False}, {"rotation": 1.0}, {"rank": 3}])
def test_equals_the_recurrence(options: dict):
    mixer, u = build(**options), inputs()
    torch.testing.assert_close(mixer(u), by_token(mixer, u), rtol=1e-10, atol=1e-10)


def test_without_its_additions_it_is_mamba_2(monkeypatch):
    """No rotation, lambda of 1, no norms and biases of B and C, constant rates: Mamba-2, without what it convolves."""
    monkeypatch.setattr("basecap.mixers.mamba_3.rms_norm", lambda x, eps: x)
    mixer, u = build(rotation=0.0, trapezoid=False), inputs().requires_grad_()
    plain = moved(Mamba2(Mamba2.Config(heads=2, state=8, conv=False, norm=False), LayerSpec(hidden=12)), 0.3)
    monkeypatch.setattr(plain, "_convolve", lambda mixed, segments=None: mixed.split(plain.widths, dim=-1))
    with torch.no_grad():
        for name in ("B_gain", "C_gain"):
            getattr(mixer, name).fill_(1.0)
        for name in ("B_bias", "C_bias"):
            getattr(mixer, name).zero_()
        *_, rate, _, _ = mixer.in_proj.weight.split(mixer.parts)
        rate.zero_()
        plain.in_proj.weight.copy_(mixer.in_proj.weight[: -len(rate)])
        plain.A_log.fill_(math.log(math.log(2.0)))  # softplus of 0
        for name in ("dt_bias", "D", "out_proj.weight"):
            plain.get_parameter(name).copy_(mixer.get_parameter(name))
    found, expected = ((y := own(u), *torch.autograd.grad(y.square().sum(), u)) for own in (mixer, plain))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mixer.influence(u).whole(), plain.influence(u).whole(), rtol=1e-10, atol=1e-10)


def test_a_rank_that_neither_enters_nor_leaves_is_none():
    """MIMO of rank 2 whose second write and read have the weight 0 is the plain form with the weights of the first."""
    wide, plain, u = build(rank=2), build(), inputs()
    with torch.no_grad():
        for weights in (wide.mimo_x, wide.mimo_z, wide.mimo_o):
            weights[:, 0], weights[:, 1] = 1.0, 0.0
        own = dict(plain.named_parameters())
        for name, parameter in wide.named_parameters():
            if name in ("B_bias", "C_bias"):
                own[name].copy_(parameter[:, 0])
            elif name in own and name != "in_proj.weight":
                own[name].copy_(parameter)
        z, x, B, C, *rest = wide.in_proj.weight.split(wide.parts)
        plain.in_proj.weight.copy_(torch.cat([z, x, B[:8], C[:8], *rest]))
    torch.testing.assert_close(wide(u), plain(u), rtol=1e-10, atol=1e-10)


def test_phases_of_a_long_text_keep_their_digits():
    mixer, T = build().float(), 4000
    u = inputs(T).float()
    wide = build()
    exact = wide._rotated(wide._flow(u.double())[1])[0]
    assert (mixer._rotated(mixer._flow(u)[1])[0] - exact).abs().max() < 2e-3


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"^rank is 9, more than a state of 8 x 12 per head can hold \(8\); choose a"):
        build(rank=9)
    with pytest.raises(ConfigError, match=r"rotation 0\.2 of 8 states leaves no pair to rotate; choose a larger one"):
        build(rotation=0.2)


def test_published_size():
    with torch.device("meta"):
        model = LanguageModel(model_config("mamba-3", hidden=768, vocab=32_000))
    mixer = model.blocks[0].mixer
    assert (mixer.heads, mixer.head_dim, mixer.angles) == (24, 64, 32)
    projections = 768 * (2 * 1536 + 2 * 128 + 3 * 24 + 32) + 1536 * 768
    plain = projections + 2 * 24 * 128 + 2 * 128 + 2 * 24
    assert sum(p.numel() for p in mixer.parameters()) == plain
    with torch.device("meta"):
        mimo = LanguageModel(model_config("mamba-3 mimo", hidden=768, vocab=32_000))
    further = 2 * 3 * 128 * 768 + 2 * 3 * 24 * 128 + 3 * 4 * 1536  # B and C, their biases, mimo_x, mimo_z, mimo_o
    assert sum(p.numel() for p in mimo.blocks[0].mixer.parameters()) == plain + further
    # The narrower SwiGLU gives back what the further B and C take.
    assert mimo.parameters_count() - model.parameters_count() == 12 * (further - 768**2)


@pytest.mark.parametrize(
    ("rank", "how"),
    [(1, "as it is"), (3, "as it is"), (1, "checkpointed"), (3, "checkpointed"), (3, "compiled")],
)
def test_on_a_gpu_neither_queries_nor_keys_of_heads_are_kept(rank: int, how: str, monkeypatch: pytest.MonkeyPatch):
    """Backward makes them again, with the same bits, also inside of activation checkpointing and compiled code."""
    monkeypatch.setattr(_saved, "RECOMPUTED", ("cpu",))
    mixer, u = build(rank=rank), inputs().requires_grad_()
    leaves, kept = [u, *mixer.parameters()], list[Tensor]()
    run = {
        "as it is": mixer,
        "checkpointed": lambda x: checkpoint(mixer, x, use_reentrant=False, context_fn=keep_choice),
        "compiled": torch.compile(mixer, backend="aot_eager", fullgraph=True),
    }[how]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        found = run(u)
    assert not any(x.shape[2:] == (rank, 2, 8) for x in kept)
    grads = torch.autograd.grad(found.sin().sum(), leaves)
    monkeypatch.setattr(_saved, "RECOMPUTED", ())
    expected = mixer(u)
    truth = torch.autograd.grad(expected.sin().sum(), leaves)
    for one, other in zip((found, *grads), (expected, *truth), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 3])
def test_compiled_code_trains_under_autocast(rank: int):
    """Its backward pass counts on how the results of products lie in memory."""
    mixer, u = build(rank=rank).float(), inputs().float()

    def gradients(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(u)
        return torch.autograd.grad(y.float().sin().sum(), list(mixer.parameters()))

    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(compiled), gradients(mixer), strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * float(other.abs().max()))
