"""Inputs, calls and times that the tables of `basecap bench ops` share."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from basecap.system.cuda_graph import captured, milliseconds

Row = dict[str, Any]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

#: Keys of a chunk of Top-1 selection, and of mixture of block attention.
CHUNK = 128


def attention_inputs(
    batch: int, length: int, heads: int, width: int, device: torch.device, *, groups: int | None = None
) -> list[Tensor]:
    """Return q, k, v and do, bfloat16 [B, T, H, K]; k and v have `groups` heads. q and k have root mean square 1."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (heads, groups or heads, groups or heads, heads)
    q, k, v, do = (
        torch.randn(batch, length, size, width, device=device, dtype=torch.bfloat16, generator=generator)
        for size in sizes
    )
    return [F.rms_norm(q, (width,)), F.rms_norm(k, (width,)), v, do]


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return PyTorch's causal attention with this kernel: q, k, v and the result [B, T, H, K]."""
    with sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def timed(what: str, run: Callable[[], object], repeats: int, times: int = 1) -> dict[str, float]:
    """Return the milliseconds of a call, as a CUDA graph of `times` calls and from Python."""
    return {
        f"{what} graph ms": milliseconds(captured(run, times), repeats) / times,
        f"{what} from Python ms": milliseconds(run, repeats),
    }


def runs(ran: dict[str, str]) -> dict[str, Any]:
    """Return the column that says which kernels of ours ran, and why no faster ones; none for rivals."""
    return {"runs": "; ".join(ran.values())} if ran else {}
