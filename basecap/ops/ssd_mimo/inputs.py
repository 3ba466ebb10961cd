"""What the op takes beside queries, keys and values."""

from typing import NamedTuple

from torch import Tensor


class Strengths(NamedTuple):
    """What happens to the state of a head at a token, [B, T, H] each.

    Attributes:
        log_decay: log a_t, at most 0.
        now: with what strength the token reads itself.
        kept: with what strength later tokens read it.
    """

    log_decay: Tensor
    now: Tensor
    kept: Tensor


class Heads(NamedTuple):
    """How heads make their queries and keys of those of their group: by a bias, then by a rotation.

    Attributes:
        q_bias: [H, R, K].
        k_bias: [H, R, K].
        angles: [B, T, H, A], by which the first A pairs of neighbouring channels rotate.
    """

    q_bias: Tensor
    k_bias: Tensor
    angles: Tensor
