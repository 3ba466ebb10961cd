"""Kernels of other libraries beside ours, in one run, as their users call them.

A peer is imported when it is measured. One whose installed release is known to be wrong on this GPU, or that fails, has
a row that says why.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from basecap.bench.attentions import CHUNK, Attention, Row, attention_inputs, runs, sdpa, timed
from basecap.bench.peers import moba
from basecap.ops import recorded, top1_chunk, top1_chunk_choice
from basecap.ops.channel_delta_rule import channel_delta_rule
from basecap.ops.delta_rule import delta_rule
from basecap.ops.known_bad import FLA_DELTA, in_doubt_on, known_bad_on
from basecap.system.cuda_graph import milliseconds

#: Takes the inputs of its comparison and returns the output.
Op = Callable[..., Tensor]

#: Query heads, their groups, head size and the longest sequence of native sparse attention: 16 heads share a choice.
SPARSE = (64, 4, 128, 32_768)
#: Heads, head size and the longest sequence of the delta rules: the heads of Kimi Linear, and of Qwen3-Next's values.
DELTA = (32, 128, 8192)
WHAT = "forward+backward"


class Contender(NamedTuple):
    """An op to measure.

    Attributes:
        build: imports and returns it.
        module: what has to be installed, or None.
        kernels: what `basecap.ops.known_bad` calls its kernels.
        like: an earlier contender that computes the same.
    """

    build: Callable[[], Op]
    module: str | None = None
    kernels: str = ""
    like: str | None = None


class Compared(NamedTuple):
    """Contenders by name with the tensors that all of them take, and the gradient of their output."""

    contenders: dict[str, Contender]
    inputs: list[Tensor]
    upstream: Tensor


def attention_peers(heads: int, width: int, length: int, device: torch.device) -> Compared:
    """Return causal attention, and attention to the own and one more chunk, on q, k, v [1, T, H, K]."""
    q, k, v, do = attention_inputs(1, length, heads, width, device)
    full, exact = "flash-attention-2", "top1-chunk exact"
    contenders = {
        full: Contender(lambda: partial(sdpa, SDPBackend.FLASH_ATTENTION)),
        "cudnn": Contender(lambda: partial(sdpa, SDPBackend.CUDNN_ATTENTION), like=full),
        "flash-attention-3": Contender(partial(_flash, "flash_attn_interface"), "flash_attn_interface", like=full),
        "flash-attention-4": Contender(partial(_flash, "flash_attn.cute"), "flash_attn.cute", like=full),
        exact: Contender(lambda: _top1("exact")),
        "flex block mask of its choice": Contender(partial(flex_of_choice, q, k), like=exact),
        "top1-chunk approx": Contender(lambda: _top1("approx")),
        "fla moba": Contender(lambda: moba(length, CHUNK, device), "fla.ops.moba"),
    }
    return Compared(contenders, [q, k, v], do)


def sparse_peers(length: int, device: torch.device) -> Compared:
    """Return native sparse attention, 16 of the blocks of 64, beside Top-1 chunks, with 16 query heads for each key."""
    heads, groups, width, longest = SPARSE
    q, k, v, do = attention_inputs(1, min(length, longest), heads, width, device, groups=groups)
    contenders = {
        "top1-chunk exact": Contender(lambda: _top1("exact")),
        "top1-chunk approx": Contender(lambda: _top1("approx")),
        "fla nsa": Contender(_nsa, "fla.ops.nsa"),
    }
    return Compared(contenders, [q, k, v], do)


def delta_peers(length: int, device: torch.device) -> Compared:
    """Return the gated delta rule on q, k, v [1, T, H, K], beta and log decays [1, T, H]."""
    inputs, do = _delta_inputs(length, device)
    contenders = {
        "delta_rule": Contender(lambda: lambda *x: delta_rule(*x)[0]),
        "fla gated delta rule": Contender(
            partial(_fla, "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
            "fla.ops.gated_delta_rule",
            FLA_DELTA,
            "delta_rule",
        ),
    }
    return Compared(contenders, inputs, do)


def kda_peers(length: int, device: torch.device) -> Compared:
    """Return the delta rule with a decay for each channel, log decays [1, T, H, K]; else as `delta_peers`."""
    inputs, do = _delta_inputs(length, device, channels=True)
    contenders = {
        "channel_delta_rule": Contender(lambda: lambda *x: channel_delta_rule(*x)[0]),
        "fla kda": Contender(partial(_fla, "fla.ops.kda", "chunk_kda"), "fla.ops.kda", FLA_DELTA, "channel_delta_rule"),
    }
    return Compared(contenders, inputs, do)


def measure(comparison: Compared, repeats: int, device: torch.device) -> list[Row]:
    """Return a row for each contender; that of one which is not installed has no more than `absent`, what it needs.

    `differs` is how far the output and the gradients of a contender are from those of the one it is like: the norm of
    the difference over the norm, the largest of them.
    """
    rows: list[Row] = []
    kept: dict[str, list[Tensor]] = {}
    asked = {contender.like for contender in comparison.contenders.values()}
    for name, contender in comparison.contenders.items():
        if contender.module is not None and _missing(contender.module):
            rows.append({"op": name, "absent": contender.module})
            continue
        fault = known_bad_on(device).get(contender.kernels)
        if fault is not None:
            rows.append({"op": name, "cannot run": fault})
            continue
        try:
            row, results = _measure(contender, comparison, repeats)
        except Exception as error:  # whatever a peer raises is its own result
            rows.append({"op": name, "cannot run": (str(error).strip() or type(error).__name__).splitlines()[0]})
            continue
        if contender.like in kept:
            row["differs"] = _differs(results, kept[contender.like])
        if contender.kernels in in_doubt_on(device):
            row["in doubt"] = in_doubt_on(device)[contender.kernels]
        if name in asked:
            kept[name] = results
        rows.append({"op": name, **row})
    return rows


def _measure(contender: Contender, comparison: Compared, repeats: int) -> tuple[Row, list[Tensor]]:
    op, inputs = contender.build(), [x.detach().requires_grad_() for x in comparison.inputs]

    def step() -> list[Tensor]:
        out = op(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, comparison.upstream)]

    with recorded() as ran:
        results = step()
    about = {"length": inputs[0].shape[1], **_times(step, repeats)}
    return {**about, **runs(ran)}, results


def _times(step: Callable[[], object], repeats: int) -> Row:
    try:
        return {**timed(WHAT, step, repeats)}
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # such as a peer that reads sizes back from the GPU
        python = milliseconds(step, repeats)
        return {f"{WHAT} graph ms": None, f"{WHAT} from Python ms": python, "no graph": str(error).splitlines()[0]}


def _differs(found: list[Tensor], expected: list[Tensor]) -> float:
    def parts() -> Iterator[float]:
        for a, b in zip(found, expected, strict=True):
            yield float((a.float() - b.float()).norm() / b.float().norm())

    return max(parts())


def _missing(module: str) -> bool:
    """Return whether a module is not installed; one that fails to be imported is."""
    parts = module.split(".")
    try:
        return any(importlib.util.find_spec(".".join(parts[: end + 1])) is None for end in range(len(parts)))
    except ImportError:
        return False


def _top1(mode: Any) -> Op:
    return partial(top1_chunk, chunk=CHUNK, mode=mode, backend="triton")


def _flash(module: str) -> Attention:
    function: Any = importlib.import_module(module).flash_attn_func

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = function(q, k, v, causal=True)
        out: Tensor = found[0] if isinstance(found, tuple) else found  # some releases return the softmax's sums too
        return out

    return attention


def _nsa() -> Op:
    function: Any = importlib.import_module("fla.ops.nsa").parallel_nsa

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gate = q.new_full(q.shape[:3], 0.5)
        out: Tensor = function(q, k, v, g_cmp=gate, g_slc=gate, block_counts=16, block_size=64)
        return out

    return attention


def _fla(module: str, name: str) -> Op:
    function: Any = getattr(importlib.import_module(module), name)

    def op(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
        out: Tensor = function(q, k, v, log_decay, beta.to(v.dtype), scale=1.0)[0]
        return out

    return op


def _delta_inputs(length: int, device: torch.device, *, channels: bool = False) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, beta, log decays and the gradient of the output; beta and decays are float32."""
    heads, width, longest = DELTA
    generator, shape = torch.Generator(device).manual_seed(0), (1, min(length, longest), heads, width)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, generator=generator)

    q, k = (F.normalize(draw(*shape), dim=-1).bfloat16() for _ in range(2))
    v, do = draw(*shape).bfloat16(), draw(*shape).bfloat16()
    log_decay = -0.1 * draw(*(shape if channels else shape[:3])).abs()
    return [q, k, v, draw(*shape[:3]).sigmoid(), log_decay], do


def flex_of_choice(q_BTHK: Tensor, k_BTGK: Tensor) -> Attention:
    """Return FlexAttention with the exact choice of Top-1 chunks as its mask; making the choice is not part of it."""
    choice_BHT = top1_chunk_choice(q_BTHK, k_BTGK, chunk=CHUNK, mode="exact")[..., 0].mT.contiguous()
    mask = choice_mask(choice_BHT, CHUNK)
    kernel = torch.compile(flex_attention, dynamic=False)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return kernel(q, k, v, block_mask=mask).transpose(1, 2)

    return attention


def choice_mask(choice_BHT: Tensor, chunk: int) -> BlockMask:
    """Return the mask of the own chunk, causal, and of the chosen one, with the tiles that any query of a tile needs.

    Args:
        choice_BHT: int32 [B, H, T], the chosen chunks, -1 for none.
        chunk: tokens of a chunk, and of a tile of queries.
    """
    B, H, T = choice_BHT.shape
    chunks = -(-T // chunk)
    own = torch.arange(T, device=choice_BHT.device) // chunk
    needed = torch.zeros(B, H, chunks, chunks, dtype=torch.bool, device=choice_BHT.device)
    # Without a choice a query needs its own chunk only.
    chosen = torch.where(choice_BHT < 0, own, choice_BHT).long()
    b, h = (torch.arange(size, device=choice_BHT.device) for size in (B, H))
    needed[b[:, None, None], h[:, None], own, chosen] = True
    needed |= torch.eye(chunks, dtype=torch.bool, device=choice_BHT.device)

    def visible(b: Tensor, head: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s <= t) & ((s // chunk == t // chunk) | (s // chunk == choice_BHT[b, head, t]))

    order = needed.int().argsort(dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(needed.sum(-1).int(), order, BLOCK_SIZE=chunk, mask_mod=visible, seq_lengths=(T, T))
