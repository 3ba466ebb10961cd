"""The selective scan in plain PyTorch: all chunks advance together, position by position, forward and backward.

The time axis is cut into M chunks of C tokens. A first sweep over the C positions gives what each chunk adds to
the state, the M states are chained, and a second sweep starts every chunk from the state that really enters it. Only
decays at most 1 are ever multiplied, so that nothing overflows however strong they are. The loop has at most C turns,
each on tensors [B, M, N, D]; short sequences are one chunk and need one sweep.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 128


@dataclass(frozen=True)
class _Pieces:
    """Inputs cut into chunks, positions first: decays and added states [C, B, M, N, D], the rest broadcast to it."""

    decay: Tensor
    added: Tensor
    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    A_ND: Tensor


def _cut(x_BTX: Tensor, wide: torch.dtype) -> Tensor:
    """[B, T, X] -> [C, B, M, X], padded with zeros at the end."""
    B, T, X = x_BTX.shape
    C = min(CHUNK, T)
    M = -(-T // C)
    return F.pad(x_BTX.to(wide), (0, 0, 0, M * C - T)).view(B, M, C, X).permute(2, 0, 1, 3).contiguous()


def _join(x_CBMX: Tensor, like_BTX: Tensor) -> Tensor:
    """[C, B, M, X] -> [B, T, X] in the dtype of `like_BTX`."""
    return x_CBMX.permute(1, 2, 0, 3).flatten(1, 2)[:, : like_BTX.shape[1]].to(like_BTX.dtype).contiguous()


def _prepare(x: Tensor, dt: Tensor, A_DN: Tensor, B: Tensor, C: Tensor, segments: Tensor | None) -> _Pieces:
    wide = torch.promote_types(dt.dtype, torch.float32)
    x, dt = (_cut(part, wide)[..., None, :] for part in (x, dt))
    B, C = (_cut(part, wide)[..., None] for part in (B, C))
    A_ND = A_DN.to(wide).T.contiguous()
    decay = (dt * A_ND).exp_()
    if segments is not None:
        begins = torch.zeros_like(segments, dtype=torch.bool)
        begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
        decay.masked_fill_(_cut(begins[..., None], torch.bool)[..., None], 0)
    return _Pieces(decay=decay, added=(x * dt) * B, x=x, dt=dt, B=B, C=C, A_ND=A_ND)


def _sweep(decay: Tensor, added: Tensor, state: Tensor, keep: bool) -> Tensor:
    """Return the last state of h_c = decay_c h_{c-1} + added_c; with `keep`, every h_c replaces added_c."""
    for c in range(added.shape[0]):
        state = torch.addcmul(added[c], decay[c], state, out=added[c] if keep else None)
    return state


def _sweep_back(decay: Tensor, added: Tensor, later: Tensor, keep: bool) -> Tensor:
    """Return decay_0 g_0 of g_c = added_c + decay_{c+1} g_{c+1}, `later` being the term after the last one.

    With `keep`, every g_c replaces added_c.
    """
    passed = torch.empty_like(added[0])
    for c in reversed(range(added.shape[0])):
        later = torch.mul(decay[c], torch.add(added[c], later, out=added[c] if keep else None), out=passed)
    return later


def _chain(decay_BMND: Tensor, added_BMND: Tensor, first_BND: Tensor) -> Tensor:
    """Return [B, M + 1, N, D]: the state before each chunk and after the last."""
    states = [first_BND]
    for m in range(added_BMND.shape[1]):
        states.append(torch.addcmul(added_BMND[:, m], decay_BMND[:, m], states[-1]))
    return torch.stack(states, dim=1)


def _run(pieces: _Pieces, state_BDN: Tensor | None) -> Tensor:
    """Turn what is added at every position into the state there; return the one that enters each chunk."""
    _, B, M, N, D = pieces.added.shape
    first = pieces.added.new_zeros(B, N, D) if state_BDN is None else state_BDN.to(pieces.added.dtype).mT
    entering = first[:, None]
    if M > 1:
        alone = _sweep(pieces.decay, pieces.added, torch.zeros_like(pieces.added[0]), keep=False)
        entering = _chain(pieces.decay.prod(0), alone, first)[:, :-1]
    _sweep(pieces.decay, pieces.added, entering, keep=True)
    return entering


def _through_decays(pieces: _Pieces, entering: Tensor, h: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the decays exp(dt A) pass on to dt [C, B, M, D] and to A [N, D]."""
    ddt, dA_BMND = torch.empty_like(pieces.dt[..., 0, :]), torch.zeros_like(h[0])
    # Position by position, since products of the full size would cost more in fresh memory than in arithmetic.
    exponent, product = torch.empty_like(h[0]), torch.empty_like(h[0])
    for c in range(h.shape[0]):
        torch.mul(entering if c == 0 else h[c - 1], pieces.decay[c], out=exponent).mul_(dh[c])
        torch.sum(torch.mul(exponent, pieces.A_ND, out=product), -2, out=ddt[c])
        dA_BMND.addcmul_(exponent, pieces.dt[c])
    return ddt, dA_BMND.sum((0, 1))


def forward(
    x_BTD: Tensor,
    dt_BTD: Tensor,
    A_DN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    state_BDN: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, D] in the dtype of x and the final state [B, D, N], at least float32.

    Memory: two tensors of B T D N numbers, freed on return.
    """
    pieces = _prepare(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, segments)
    _run(pieces, state_BDN)
    h = pieces.added
    y = (pieces.C.mT @ h)[..., 0, :]
    return _join(y, x_BTD), h[-1, :, -1].mT.contiguous()


def backward(
    grads: tuple[Tensor, Tensor],
    x_BTD: Tensor,
    dt_BTD: Tensor,
    A_DN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    state_BDN: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C and the first state, given those of the outputs and the final state.

    States are computed anew; memory: three tensors of B T D N numbers, freed on return.
    """
    pieces = _prepare(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, segments)
    entering = _run(pieces, state_BDN)
    h = pieces.added
    dy = _cut(grads[0], h.dtype)[..., None, :]
    final = grads[1].to(h.dtype).mT
    dh = pieces.C * dy
    leaving = final[:, None]
    if h.shape[2] > 1:
        alone = _sweep_back(pieces.decay, dh, torch.zeros_like(dh[0]), keep=False)
        leaving = _chain(pieces.decay.prod(0).flip(1), alone.flip(1), final)[:, :-1].flip(1)
    dstate_BDN = _sweep_back(pieces.decay, dh, leaving, keep=True)[:, 0].mT.contiguous()

    dC = (h @ dy.mT)[..., 0]
    du = pieces.B.mT @ dh
    dB = (dh @ (pieces.x * pieces.dt).mT)[..., 0]
    ddt, dA_ND = _through_decays(pieces, entering, h, dh)
    ddt += (pieces.x * du)[..., 0, :]
    return (
        _join((pieces.dt * du)[..., 0, :], x_BTD),
        _join(ddt, dt_BTD),
        dA_ND.T.to(A_DN.dtype).contiguous(),
        _join(dB, B_BTN),
        _join(dC, C_BTN),
        dstate_BDN,
    )
