"""The definition of the selective scan, any dtype, one token at a time."""

import torch
from torch import Tensor


def selective_scan(
    x_BTD: Tensor,
    dt_BTD: Tensor,
    A_DN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    state_BDN: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, D] and the final state [B, D, N]; see `basecap.ops.selective_scan.selective_scan`."""
    B, T, D = x_BTD.shape
    h_BDN = x_BTD.new_zeros(B, D, A_DN.shape[1]) if state_BDN is None else state_BDN
    outputs = []
    for t in range(T):
        kept = torch.exp(dt_BTD[:, t, :, None] * A_DN)
        if segments is not None and t > 0:
            kept = kept * (segments[:, t] == segments[:, t - 1])[:, None, None]
        h_BDN = kept * h_BDN + (dt_BTD[:, t] * x_BTD[:, t])[..., None] * B_BTN[:, t, None, :]
        outputs.append(torch.einsum("bdn,bn->bd", h_BDN, C_BTN[:, t]))
    return torch.stack(outputs, dim=1), h_BDN


def factors(dt_BTD: Tensor, A_DN: Tensor, B_BTN: Tensor, C_BTN: Tensor) -> Tensor:
    """Return [B, D, T, T], sum_n C_tn exp(A_n sum_{s<r<=t} dt_r) B_sn dt_s, whose upper triangle means nothing."""
    B, T, D = dt_BTD.shape
    # Sums over s < r <= t, without the cancellation in a difference of two longer sums.
    elapsed = dt_BTD.transpose(1, 2)[..., None].expand(B, D, T, T).tril(-1).cumsum(-2)
    matrix = torch.zeros_like(elapsed)
    for n in range(A_DN.shape[1]):
        product_BTT = C_BTN[:, :, None, n] * B_BTN[:, None, :, n]
        matrix.addcmul_((A_DN[:, n, None, None] * elapsed).exp_(), product_BTT[:, None])
    return matrix * dt_BTD.transpose(1, 2)[:, :, None]
