"""The selective scan in plain PyTorch: all chunks advance together, position by position, forward and backward.

The time axis is cut into M chunks of C tokens. A first sweep over the C positions gives what each chunk adds to
the state, the M states are chained, and a second sweep starts every chunk from the state that really enters it. Only
decays at most 1 are ever multiplied, so that nothing overflows however strong they are. A sweep has at most C turns,
each on tensors [B, M, N, D]; short sequences are one chunk and need one sweep. Decays and states exist for S positions
at a time: on a processor, memory outside its cache costs more than computing them again.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.ops._dispatch import EAGER
from basecap.ops._recurrence.blocks import starts

RUNS, BACKEND = EAGER, "eager"

CHUNK = 128
#: exp(x) = exp2(x log2(e)), whose CPU kernel is several times faster.
LOG2_E = math.log2(math.e)
#: Positions for which decays and states exist at a time.
SPAN = 8


def supports(x: Tensor) -> None:
    """Return None: this runs everywhere."""


@dataclass(frozen=True)
class _Pieces:
    """Inputs cut into chunks, positions first, all to be broadcast to [C, B, M, N, D]."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    A_ND: Tensor
    begins: Tensor | None

    def spans(self) -> list[slice]:
        """Return the C positions, S at a time."""
        return [slice(start, start + SPAN) for start in range(0, len(self.x), SPAN)]

    def space(self, count: int) -> list[Tensor]:
        """Return tensors [S, B, M, N, D] to compute in: used again for every span, they are fetched only once."""
        _, B, M, _, D = self.x.shape
        return list(self.x.new_empty(count, min(SPAN, len(self.x)), B, M, len(self.A_ND), D))

    def decay(self, span: slice, out: Tensor) -> Tensor:
        """Return the factors in front of the state before [S, B, M, N, D]."""
        decay = _product(self.dt[span], self.A_ND * LOG2_E, out).exp2_()
        return decay if self.begins is None else decay.masked_fill_(self.begins[span], 0)

    def added(self, span: slice, out: Tensor) -> Tensor:
        """Return what is added to the state [S, B, M, N, D]."""
        return _product(self.x[span] * self.dt[span], self.B[span], out)

    def decay_of_chunks(self) -> Tensor:
        """Return the product of a chunk's decays [B, M, N, D]."""
        decay = (self.dt.sum(0) * (self.A_ND * LOG2_E)).exp2_()
        return decay if self.begins is None else decay.masked_fill_(self.begins.any(0), 0)


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Return a b in the first places of `out`: the last span may be shorter than the others."""
    return torch.mul(a, b, out=out[: len(a)])


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
    new = starts(segments)
    begins = None if new is None else _cut(new[..., None], torch.bool)[..., None]
    # Padding, steps of 0, must leave a state as it is even where A is infinite; half, since A is multiplied by log2(e).
    A_ND = A_DN.to(wide).T.contiguous().clamp(min=torch.finfo(wide).min / 2)
    return _Pieces(x=x, dt=dt, B=B, C=C, A_ND=A_ND, begins=begins)


def _states(decay: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """Turn added_c into h_c = decay_c h_{c-1} + added_c, given the state before; return the last, a view."""
    for decay_c, added_c in zip(decay.unbind(), added.unbind(), strict=True):
        state = added_c.addcmul_(decay_c, state)
    return state


def _cotangents(decay: Tensor, C: Tensor, dy: Tensor, later: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return g_c = C_c dy_c + decay_{c+1} g_{c+1} in the first places of `out`, and a copy of decay_0 g_0.

    `later` is the term after the last one; decay_c becomes decay_c g_c.
    """
    g = out[: len(decay)]
    parts = [reversed(part.unbind()) for part in (decay, C, dy, g)]
    for decay_c, C_c, dy_c, g_c in zip(*parts, strict=True):
        later = decay_c.mul_(torch.addcmul(later, C_c, dy_c, out=g_c))
    return g, later.clone()


def _chain(decay_BMND: Tensor, added_BMND: Tensor, first_BND: Tensor) -> Tensor:
    """Return [B, M + 1, N, D]: the state before each chunk and after the last."""
    states = [first_BND]
    for m in range(added_BMND.shape[1]):
        states.append(torch.addcmul(added_BMND[:, m], decay_BMND[:, m], states[-1]))
    return torch.stack(states, dim=1)


def _entering(pieces: _Pieces, state_BDN: Tensor | None) -> Tensor:
    """Return the state that enters each chunk [B, M, N, D]."""
    _, B, M, _, D = pieces.x.shape
    N = pieces.A_ND.shape[0]
    first = pieces.x.new_zeros(B, N, D) if state_BDN is None else state_BDN.to(pieces.x.dtype).mT
    if M == 1:
        return first[:, None]
    alone = pieces.x.new_zeros(B, M, N, D)
    space = pieces.space(2)
    for span in pieces.spans():
        alone = _states(pieces.decay(span, space[0]), pieces.added(span, space[1]), alone).clone()
    return _chain(pieces.decay_of_chunks(), alone, first)[:, :-1]


def _leaving(pieces: _Pieces, dy: Tensor, final_BND: Tensor) -> Tensor:
    """Return the gradient of the state that leaves each chunk [B, M, N, D], given that of the last."""
    if dy.shape[2] == 1:
        return final_BND[:, None]
    alone = torch.zeros_like(dy[0])
    space = pieces.space(2)
    for span in reversed(pieces.spans()):
        _, alone = _cotangents(pieces.decay(span, space[0]), pieces.C[span], dy[span], alone, space[1])
    return _chain(pieces.decay_of_chunks().flip(1), alone.flip(1), final_BND)[:, :-1].flip(1)


def kept_shape(x_BTD: Tensor, A_DN: Tensor) -> tuple[int, int, int, int, int]:
    """Return the shape [C / S, B, M, N, D] of the states that `forward` keeps."""
    B, T, D = x_BTD.shape
    C = min(CHUNK, T)
    return -(-C // SPAN), B, -(-T // C), A_DN.shape[1], D


def forward(
    x_BTD: Tensor,
    dt_BTD: Tensor,
    A_DN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    state_BDN: Tensor | None,
    segments: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [B, T, D] in the dtype of x and the final state [B, D, N], at least float32.

    Third come the states before every S positions, which `backward` starts from; without `keep` none.
    """
    pieces = _prepare(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, segments)
    state, y, space = _entering(pieces, state_BDN), [], pieces.space(2)
    kept = pieces.x.new_empty(kept_shape(x_BTD, A_DN) if keep else 0)
    for i, span in enumerate(pieces.spans()):
        # A copy: the space that holds the state so far is about to be used again.
        state = kept[i].copy_(state) if keep else state.clone()
        h = pieces.added(span, space[0])
        state = _states(pieces.decay(span, space[1]), h, state)
        y.append((pieces.C[span].mT @ h)[..., 0, :])
    return _join(torch.cat(y), x_BTD), state[:, -1].mT.contiguous(), kept


def backward(
    grads: tuple[Tensor, Tensor | None],
    x_BTD: Tensor,
    dt_BTD: Tensor,
    A_DN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    segments: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C and the first state, given those of the outputs and the final state.

    The latter is None where there is none.
    `states` are those that `forward` kept, B T D N / S numbers; the S after each are computed again.
    """
    pieces = _prepare(x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, segments)
    dy = _cut(grads[0], pieces.x.dtype)[..., None, :]
    space = pieces.space(3)
    final = dy.new_zeros(len(x_BTD), *A_DN.shape) if grads[1] is None else grads[1].to(dy.dtype)
    later = _leaving(pieces, dy, final.mT)
    du, ddt = torch.empty_like(dy), torch.empty_like(dy)
    dB, dC = torch.empty_like(pieces.B).mT, torch.empty_like(pieces.C).mT
    dA_BMND = torch.zeros_like(states[0])
    for span, state in zip(reversed(pieces.spans()), reversed(states.unbind()), strict=True):
        decay, h = pieces.decay(span, space[0]), pieces.added(span, space[1])
        _states(decay, h, state)
        dh, later = _cotangents(decay, pieces.C[span], dy[span], later, space[2])
        # Rows times matrices: matrices times columns take half as long again.
        dC[span] = dy[span] @ h.mT
        du[span] = pieces.B[span].mT @ dh
        dB[span] = (pieces.x[span] * pieces.dt[span]) @ dh.mT
        # The gradient of the exponent dt A is h_{c-1} decay_c g_c.
        exponent = decay
        exponent[0].mul_(state)
        exponent[1:].mul_(h[:-1])
        for gradient, dt in zip(exponent, pieces.dt[span], strict=True):
            dA_BMND.addcmul_(gradient, dt)
        ddt[span] = exponent.mul_(pieces.A_ND).sum(-2, keepdim=True)
    ddt.addcmul_(pieces.x, du)
    return (
        _join((pieces.dt * du)[..., 0, :], x_BTD),
        _join(ddt[..., 0, :], dt_BTD),
        dA_BMND.sum((0, 1)).T.to(A_DN.dtype).contiguous(),
        _join(dB[..., 0, :], B_BTN),
        _join(dC[..., 0, :], C_BTN),
        later[:, 0].mT.contiguous(),
    )
