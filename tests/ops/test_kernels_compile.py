"""Every kernel compiles for a Hopper GPU as the operators launch it; no GPU is needed.

Where there is none, the other tests run kernels in Triton's interpreter, which takes programs that its compiler
refuses. A process either interprets or compiles, so that this file is also the program that a test starts.
"""

import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import basecap.ops
from basecap.ops import top1_chunk, top1_chunk_cache, top1_chunk_choice, top1_chunk_step
from basecap.ops.channel_delta_rule import channel_delta_rule
from basecap.ops.delta_rule import delta_rule
from basecap.ops.forgetting_attention import forgetting_attention
from basecap.ops.linear_cross_entropy import linear_cross_entropy
from basecap.ops.long_convolution import long_convolution
from basecap.ops.selective_scan import selective_scan
from basecap.ops.short_convolution import short_convolution
from basecap.ops.ssd import ssd
from basecap.ops.ssd_mimo import Heads, Strengths, ssd_mimo
from basecap.ops.taylor_attention import taylor_attention
from basecap.ops.taylor_attention.triton_kernels import operators as taylor_operators
from basecap.ops.token_choice import choose_by_index, choose_by_mass, index_divergence
from basecap.ops.top1_element import operators as element_operators
from basecap.ops.wkv4 import wkv4
from basecap.ops.wkv6 import wkv6
from basecap.ops.wkv7 import wkv7, wkv7_bounded
from tests.ops._assembly import disassemble, unwritten
from tests.ops._cards import pretend, record_keys, stop_at_llvm

#: Loads of spilled registers that a kernel in Gluon may have: this one's accumulators nearly fill them.
SPILLED = {("attend_bwd_kernel", 128): 60}
#: The module whose kernels must not multiply by wgmma; the op's README says why.
WITHOUT_WGMMA = "basecap.ops.channel_delta_rule.triton_chunks"
#: The module whose kernels must not spill registers: one that did between products by wgmma was wrong on a GPU.
WITHOUT_SPILLS = "basecap.ops.ssd_mimo.triton_chunks"

B, T, H = 2, 256, 4


# Kernels of Triton are compiled to LLVM's code, which is all that depends on them but what an assembler makes of it.
# After a change of kernels also `python -m tests.ops.test_kernels_compile float32` and `bfloat16`, which take a minute
# and two and go on to a GPU's code: what they compile beside this, a card tests in their stead.
# `make cards`, a job of the workflow, compiles all of them for other cards.
@pytest.mark.timeout(600)  # a minute where it has a core to itself
def test_kernels_compile(tmp_path: Path, pytestconfig: pytest.Config):
    pytest.importorskip("triton")
    # Kept from run to run, by the source of a kernel, its options, Triton and the assembler: what is there compiled.
    store = getattr(pytestconfig, "cache", None)
    compiled = tmp_path if store is None else store.mkdir("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(compiled)}
    command, root = [sys.executable, "-m", "tests.ops.test_kernels_compile", "suite"], Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor that wants a gradient; nobody looks at its numbers."""
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def packed(x: Tensor) -> Tensor:
    """Return segments [B, T] of 100 tokens each for inputs [B, T, ...]."""
    return (torch.arange(x.shape[1]) // 100).expand(x.shape[:2])


def train(op: Callable[..., tuple[Tensor, ...]], *inputs: Tensor, **history: Tensor) -> None:
    """Run an operator and its backward pass.

    In bfloat16 with a first state, packed sequences and a gradient of the final state; in float32, to take the other
    branches and to spare time, with nothing of these. Heads have their usual width in bfloat16, where it decides what
    fits on the chip; exact products in float32 are long unrolled code, the longer the wider.
    """
    if inputs[0].dtype == torch.float32:
        outputs = op(*inputs)[:1]
    else:
        outputs = op(*inputs, **history, segments=packed(inputs[0]))
    torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])


def launch_channel_delta_rule(dtype: torch.dtype) -> None:
    K, V = (128, 128) if dtype == torch.bfloat16 else (16, 16)
    for width in (V, 2 * V) if dtype == torch.bfloat16 else (V,):  # by chunks, and the recurrence
        q, k, v = (leaf(B, T, H, channels, dtype=dtype) for channels in (K, K, width))
        op = partial(channel_delta_rule, backend="triton")
        train(op, q, k, v, leaf(B, T, H), leaf(B, T, H, K), state_BHKV=leaf(B, H, K, width))


def launch_delta_rule(dtype: torch.dtype) -> None:
    K, V = (96, 128) if dtype == torch.bfloat16 else (16, 16)
    q, k, v = (leaf(B, T, H, width, dtype=dtype) for width in (K, K, V))
    beta, log_decay = leaf(B, T, H), leaf(B, T, H)
    if dtype == torch.float32:
        train(delta_rule, q, k, v, beta)
    else:
        train(delta_rule, q, k, v, beta, log_decay, state_BHKV=leaf(B, H, K, V))


def launch_forgetting_attention(dtype: torch.dtype) -> None:
    K, segments = (64, True) if dtype == torch.bfloat16 else (16, False)
    q, k, v = (leaf(B, T, H, K, dtype=dtype) for _ in range(3))
    forgetting_attention(q, k, v, leaf(B, T, H), segments=packed(q) if segments else None).sum().backward()


def launch_linear_cross_entropy(dtype: torch.dtype) -> None:
    hidden, weight = leaf(4, 16, dtype=dtype), leaf(50304, 16, dtype=dtype)
    linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64)).backward()


def launch_long_convolution(dtype: torch.dtype) -> None:
    # Blocks enough for whole tiles of columns, and fewer.
    rows = 8 * B if dtype == torch.bfloat16 else B
    u, taps = leaf(rows, 2048, 16, dtype=dtype), leaf(512, 16)
    long_convolution(u, taps, backend="triton").sum().backward()


def launch_selective_scan(dtype: torch.dtype) -> None:
    D, N = 64, 16
    length = 4096 if dtype == torch.bfloat16 else T  # two spans, and one
    x, dt = leaf(B, length, D, dtype=dtype), leaf(B, length, D)
    enter, read = leaf(B, length, N, dtype=dtype), leaf(B, length, N, dtype=dtype)
    train(selective_scan, x, dt, leaf(D, N), enter, read, state_BDN=leaf(B, D, N))


def launch_short_convolution(dtype: torch.dtype) -> None:
    wide, weight, bias = leaf(B, T, 256, dtype=dtype), leaf(128, 4), leaf(128)
    x = wide[..., :128]
    short_convolution(x, weight, bias, activation="silu").sum().backward()
    short_convolution(x, weight, segments=packed(x)).sum().backward()


def launch_ssd(dtype: torch.dtype) -> None:
    (K, V), heads = (128, 64) if dtype == torch.bfloat16 else (16, 16), 16
    q, k, v = leaf(B, T, 1, K, dtype=dtype), leaf(B, T, 1, K, dtype=dtype), leaf(B, T, heads, V, dtype=dtype)
    train(partial(ssd, backend="triton"), q, k, v, leaf(B, T, heads), state_BHKV=leaf(B, heads, K, V))


def launch_ssd_mimo(dtype: torch.dtype) -> None:
    (K, V), heads = (128, 64) if dtype == torch.bfloat16 else (16, 16), 16

    def op(v: Tensor, q: Tensor, k: Tensor, *rest: Tensor, **history: Tensor) -> tuple[Tensor, ...]:
        return ssd_mimo(q, k, v, Strengths(*rest[:3]), heads=Heads(*rest[3:]), backend="triton", **history)

    for R in (4, 1) if dtype == torch.bfloat16 else (4,):  # programs of four warps, and of eight
        # Queries and keys are wider than values, as in Mamba-3.
        q, k, v = leaf(B, T, R, 1, K), leaf(B, T, R, 1, K), leaf(B, T, R, heads, V, dtype=dtype)
        per_head = [leaf(B, T, heads) for _ in range(3)]
        biases = [leaf(heads, R, K) for _ in range(2)]
        train(op, v, q, k, *per_head, *biases, leaf(B, T, heads, K // 4), state_BHKV=leaf(B, heads, K, V))


def launch_taylor_attention(dtype: torch.dtype) -> None:
    K, V = (16, 64) if dtype == torch.bfloat16 else (8, 16)
    q, k, v = (leaf(1, 2 * taylor_operators.CHUNK, 1, width, dtype=dtype) for width in (K, K, V))
    taylor_attention(q, k, v).sum().backward()


def launch_token_choice(dtype: torch.dtype) -> None:
    K, segments = (64, True) if dtype == torch.bfloat16 else (16, False)
    index = leaf(B, T, H, K, dtype=dtype), leaf(B, T, K, dtype=dtype), leaf(B, T, H, dtype=dtype)
    q, k, ids = leaf(B, T, H, K, dtype=dtype), leaf(B, T, 1, K, dtype=dtype), packed(index[0]) if segments else None
    given = {"segments": ids, "backend": "triton"}
    chosen = choose_by_index(*index, 64, **given) & choose_by_mass(q, k, 64, **given)
    index_divergence(*index, q, k, chosen_BTT=chosen if segments else None, **given).backward()


def launch_top1_chunk(dtype: torch.dtype) -> None:
    settings = [(16, "exact", 1, 9, 128, False), (16, "approx", 1, 9, 128, False)]
    if dtype == torch.bfloat16:
        # Tiles of every size, both modes, both kinds of addresses; and before Hopper, where other kernels choose.
        settings = [(64, "exact", 1, 9, 128, False), (128, "approx", 1, 9, 128, False)]
        settings += [(256, "approx", 1, 9, 128, True), (256, "exact", 1, 8, 64, False)]
    launch_settings(dtype, settings)


def launch_more_top1_chunk(dtype: torch.dtype) -> None:
    """Launch the other sizes with each mode and both kinds of addresses, and what goes back before Hopper."""
    if dtype == torch.bfloat16:
        settings = [(64, "approx", 1, 9, 64, True), (128, "exact", 2, 9, 128, True), (128, "exact", 1, 8, 128, False)]
        launch_settings(dtype, settings)


def launch_settings(dtype: torch.dtype, settings: list[tuple[int, str, int, int, int, bool]]) -> None:
    """Launch the kernels of `top1_chunk` with numbers of channels, modes and so on.

    A setting is: channels, mode, chunks chosen, generation of GPUs (9: that of the card), chunk, whether numbers are
    more than 32 bits reach.
    """
    import triton.language as tl

    from basecap.ops.top1_chunk.triton_kernels import launch

    of_card = torch.cuda.get_device_capability
    for K, mode, remote, major, chunk, long in settings:
        torch.cuda.get_device_capability = (lambda device: (8, 0)) if major == 8 else of_card
        launch._index = lambda *tensors, long=long: tl.int64 if long else tl.int32
        q, k, v = (leaf(B, 4 * T, heads, K, dtype=dtype) for heads in (H, 1, 1))
        if (K, mode) == (256, "exact"):  # its attention is that of the approximate choice
            top1_chunk_choice(q, k, mode=mode, remote=remote, chunk=chunk)
        else:
            top1_chunk(q, k, v, mode=mode, remote=remote, chunk=chunk).sum().backward()
        if dtype == torch.bfloat16 and not long and K < 256:
            continue  # every size decodes in one setting or two
        token, cache = [x[:, :1] for x in (q, k, v)], top1_chunk_cache(B, 4 * T, 1, K, dtype=dtype, chunk=chunk)
        for lengths in (None, torch.zeros(B, dtype=torch.int64)):
            top1_chunk_step(*token, cache, 4 * T - 1, lengths=lengths, mode=mode, remote=remote, chunk=chunk)
    torch.cuda.get_device_capability = of_card


def launch_top1_element(dtype: torch.dtype) -> None:
    from basecap.ops._selection import launch as selection

    K = 64 if dtype == torch.bfloat16 else 16
    q, k, v = (leaf(B * T, heads, K, dtype=dtype) for heads in (H, 1, 1))
    element_operators.choose(q.detach(), k.detach(), torch.zeros(B * T, dtype=torch.int32), T, "triton_kernels")
    element_operators.choose(q.detach(), k.detach(), None, T, "triton_kernels")
    for pairs in (selection.AT_ONCE, 0):  # the index by one kernel, and by four
        selection.AT_ONCE = pairs
        # What the kernel would have chosen is not there to gather.
        element_operators.gather(v, torch.zeros(B * T, H, dtype=torch.int32), "triton_kernels").sum().backward()


def launch_wkv4(dtype: torch.dtype) -> None:
    k, v = leaf(B, T, 128, dtype=dtype), leaf(B, T, 128, dtype=dtype)
    train(wkv4, k, v, leaf(128), leaf(128), state_B2D=leaf(B, 2, 128))


def launch_wkv6(dtype: torch.dtype) -> None:
    launch_widths(dtype, [128, 130])  # values in two parts, and the recurrence


def launch_more_wkv6(dtype: torch.dtype) -> None:
    """Launch what takes the values in one part."""
    launch_widths(dtype, [64 if dtype == torch.bfloat16 else 16])


def launch_widths(dtype: torch.dtype, widths: list[int]) -> None:
    """Launch the kernels of `wkv6` with so many channels of values."""
    K = 64 if dtype == torch.bfloat16 else 16
    for V in widths:
        r, k, v = (leaf(B, T, H, width, dtype=dtype) for width in (K, K, V))
        train(wkv6, r, k, v, leaf(B, T, H, K), leaf(H, K), state_BHKV=leaf(B, H, K, V))


def launch_wkv7(dtype: torch.dtype, op: Callable[..., tuple[Tensor, ...]] = wkv7_bounded) -> None:
    r, k, v, a, b = (leaf(B, T, H, 64, dtype=dtype) for _ in range(5))
    train(op, r, leaf(B, T, H, 64), k, v, a, b, state_BHKV=leaf(B, H, 64, 64))


def launch_more_wkv7(dtype: torch.dtype) -> None:
    """Launch the recurrence, whose kernels `channel_delta_rule` launches as well."""
    launch_wkv7(dtype, wkv7)


LAUNCHES = [
    function
    for name, function in sorted(globals().items())
    if name.startswith("launch_") and function not in (launch_settings, launch_widths)
]
#: What the suite leaves to those who change kernels.
BY_HAND = (launch_more_top1_chunk, launch_more_wkv6, launch_more_wkv7)


def kernels() -> set[str]:
    """Return the names of all kernels of the operators; functions that kernels call are called otherwise."""
    from triton.runtime import JITFunction

    names = [module.name for module in pkgutil.walk_packages(basecap.ops.__path__, "basecap.ops.")]
    found = {x for name in names for x in vars(importlib.import_module(name)).values() if isinstance(x, JITFunction)}
    return {f"{x.__module__}.{x.__name__}" for x in found if x.__name__.endswith("_kernel")}


def wrong(kernel: Any, compiled: Any, options: dict) -> str:
    """Return what is wrong with the code of a kernel, or ""."""
    if kernel.__module__.startswith(WITHOUT_WGMMA) and "warp_group_dot" in compiled.asm["ttgir"]:
        return "multiplies by wgmma"
    if not kernel.is_gluon():
        return ""
    # Kernels in Gluon share out registers by hand.
    sass = compiled.asm["sass"]
    if sass.count("LDL") > SPILLED.get((kernel.__name__, options.get("K")), 0):
        return "spills registers"
    if sass.count("HGMMA") <= sass.count("WARPGROUP.DEPBAR"):
        # No failure, but products take several times as long. The assembler does so when registers are few.
        return "waits after each instruction of a product"
    return ""


def wrong_in_the_end(kernel: Any, compiled: Any, options: dict) -> str:
    """Return what is wrong with the code of a kernel, also in what the assembler made of it, or ""."""
    code = disassemble(compiled.asm["cubin"])
    if found := unwritten(code):
        return f"reads a register that nothing has written: {found[0]}"
    if kernel.__module__.startswith(WITHOUT_SPILLS) and "LDL" in code:
        return "spills registers"
    return wrong(kernel, compiled, options)


def compiled_again() -> list[str]:
    """Return the kernels of selection that Triton compiles again for another number of tokens.

    Prompts of a batch have all lengths, and the widest of these kernels take seconds. An index of many chunks, as Top-1
    elements have, may be compiled again: its kernels gain from what is known of long sequences.
    """
    global B, T
    from basecap.ops._selection import launch as selection

    pretend("H200")
    keys, sizes, again = record_keys(), (B, T), set[str]()
    for launch, left_out in ((launch_top1_chunk, ()), (launch_top1_element, ("kernels_index",))):
        keys.clear()
        counts = []
        for size in (sizes, (3, 251), (3, 240)):
            B, T = size
            selection.AT_ONCE = 2**20
            launch(torch.bfloat16)
            counts.append({kernel: len(found) for kernel, found in keys.items()})
        more = {kernel for kernel, count in counts[-1].items() if count > counts[0][kernel]}
        again |= {kernel for kernel in more if kernel.split(".")[-2] not in left_out}
    return sorted(again)


def main(dtype: torch.dtype, suite: bool) -> None:
    """Compile kernels: all in every size, or in the sizes of the suite.

    Fails if one cannot be launched or, in bfloat16, which all take, was not. The suite compiles kernels of Triton no
    further than to LLVM's code.
    """
    found = pretend("H200", wrong if suite else wrong_in_the_end)
    if suite:
        stop_at_llvm()
    for launch in LAUNCHES:
        if not (suite and launch in BY_HAND):
            launch(dtype)
    faults: dict[str, str] = {}
    for kernel, _, fault in found:
        faults[kernel] = faults.get(kernel) or fault
    report = [f"{name} {fault}" for name, fault in faults.items() if fault]
    if suite:
        report += [f"{kernel} is compiled again for another number of tokens" for kernel in compiled_again()]
    if dtype == torch.bfloat16:
        report += [f"{name} is launched by nothing in this file" for name in sorted(kernels() - faults.keys())]
        report += [f"{name} is launched: call it ..._kernel" for name in sorted(faults.keys() - kernels())]
    if report:
        sys.exit("\n".join(report))


if __name__ == "__main__":
    main(torch.bfloat16 if sys.argv[1] == "suite" else getattr(torch, sys.argv[1]), sys.argv[1] == "suite")
