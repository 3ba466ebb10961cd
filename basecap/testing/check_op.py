"""Every implementation of every op that can run on this machine, against the op's definition in float64.

The error of a kernel may be at most twice that of plain PyTorch in the same dtype, in the mean and in the worst
element. The error of plain PyTorch may be twice that of the definition evaluated in that dtype, in the mean only: in
single elements chunks are less exact than a loop over the tokens, because a decay across many tokens is the
exponential of a difference of two rounded sums.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from basecap.errors import ConfigError, nearest
from basecap.ops import recorded, unsupported_by_triton
from basecap.ops.attention import FAMILIES as attention_families
from basecap.ops.attention import attention
from basecap.ops.attention import reference as attention_reference
from basecap.ops.delta_rule import FAMILIES as delta_rule_families
from basecap.ops.delta_rule import delta_rule
from basecap.ops.delta_rule import reference as delta_rule_reference
from basecap.ops.linear_cross_entropy import FAMILIES as linear_cross_entropy_families
from basecap.ops.linear_cross_entropy import linear_cross_entropy
from basecap.ops.linear_cross_entropy import reference as linear_cross_entropy_reference
from basecap.ops.long_convolution import FAMILIES as long_convolution_families
from basecap.ops.long_convolution import long_convolution
from basecap.ops.long_convolution import reference as long_convolution_reference
from basecap.ops.selective_scan import FAMILIES as scan_families
from basecap.ops.selective_scan import reference as selective_scan_reference
from basecap.ops.selective_scan import selective_scan
from basecap.ops.short_convolution import FAMILIES as short_convolution_families
from basecap.ops.short_convolution import reference as short_convolution_reference
from basecap.ops.short_convolution import short_convolution
from basecap.ops.ssd import FAMILIES as ssd_families
from basecap.ops.ssd import reference as ssd_reference
from basecap.ops.ssd import ssd
from basecap.ops.taylor_attention import FAMILIES as taylor_families
from basecap.ops.taylor_attention import eager as taylor_eager
from basecap.ops.taylor_attention import reference as taylor_reference
from basecap.ops.taylor_attention import taylor_attention
from basecap.ops.taylor_attention.triton_kernels import operators as taylor_operators
from basecap.ops.top1_chunk import FAMILIES as chunk_families
from basecap.ops.top1_chunk import Mode, top1_chunk, top1_chunk_weights
from basecap.ops.top1_chunk import reference as chunk_reference
from basecap.ops.top1_element import FAMILIES as element_families
from basecap.ops.top1_element import reference as element_reference
from basecap.ops.top1_element import top1_element
from basecap.ops.wkv4 import FAMILIES as wkv4_families
from basecap.ops.wkv4 import reference as wkv4_reference
from basecap.ops.wkv4 import wkv4
from basecap.ops.wkv6 import FAMILIES as wkv6_families
from basecap.ops.wkv6 import reference as wkv6_reference
from basecap.ops.wkv6 import wkv6
from basecap.ops.wkv7 import FAMILIES as wkv7_families
from basecap.ops.wkv7 import eager as wkv7_eager
from basecap.ops.wkv7 import reference as wkv7_reference
from basecap.ops.wkv7 import wkv7, wkv7_bounded
from basecap.testing.tolerance import assert_as_accurate, relative_error

Function = Callable[..., Any]
Draw = Callable[..., Tensor]

#: Rows, tokens (not a multiple of a chunk size), heads, channels of a head; channels, states, vocabulary.
B, T, H, K = 2, 200, 2, 32
D, N, V = 48, 16, 300
#: Default name of the last implementation of an op.
PLAIN = "plain PyTorch"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op: functions of the same tensors that return one tensor or several.

    Attributes:
        plain: the op in plain PyTorch, or with PyTorch's kernels if basecap has none.
        definition: the formula.
        inputs: draws the tensors by name; those in `wide` stay float32, the others take the dtype.
        kernels: the op with Triton kernels; None: there are none.
        numba: the op with kernels for CPUs; None: there are none.
        cuda: the kernels have no backend name and run if the tensors are on a GPU.
        half: most of their products are in the dtype of the tensors, so outputs are compared in that dtype.
        families: the implementations that the op chooses from.
    """

    plain: Function
    definition: Function
    inputs: Callable[[Draw], Mapping[str, Tensor]]
    families: Mapping[str, ModuleType]
    wide: tuple[str, ...] = ()
    kernels: Function | None = None
    numba: Function | None = None
    cuda: bool = False
    half: bool = False

    def without_kernels(self, x: Tensor) -> str | None:
        """Return why no kernels run on a tensor like `x`, or None."""
        if self.kernels is None:
            return "the op has no kernels of its own"
        if self.cuda and not x.is_cuda:
            return f"the tensors are on {x.device.type}"
        return unsupported_by_triton(x)

    def runnable(self, x: Tensor) -> list[Function]:
        """Return what can run on a tensor like `x`: kernels first, plain PyTorch last."""
        found = []
        if self.kernels is not None and self.without_kernels(x) is None:
            found.append(self.kernels)
        if self.numba is not None and self.families["cpu"].supports(x) is None:
            found.append(self.numba)
        return [*found, self.plain]


def _dense(q: Tensor, k: Tensor, v: Tensor, chunk: int, mode: Mode) -> Tensor:
    return chunk_reference.top1_chunk(q, k, v, top1_chunk_weights(q, k, chunk=chunk, mode=mode))


def _element(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return element_reference.top1_element(q, k, v, q.shape[3] ** -0.5)


def _loss(op: Function, hidden: Tensor, weight: Tensor) -> Tensor:
    return op(hidden, weight, torch.arange(len(hidden), device=hidden.device) % V)


def _with_exact_scores(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    # Queries and keys are multiples of 1/8: scores are exact and all choose alike.
    q, k = ((F.rms_norm(x, x.shape[-1:]) * 8).round() / 8 for x in (q, k))
    return {"q": q, "k": k, "v": v}


def _choices(draw: Draw) -> dict[str, Tensor]:
    return _with_exact_scores(draw(B, T, 2 * H, K), draw(B, T, H, K), draw(B, T, H, K))


def _wide_choices(draw: Draw, width: int) -> dict[str, Tensor]:
    return _with_exact_scores(draw(1, 2 * T, 2, width), draw(1, 2 * T, 1, width), draw(1, 2 * T, 1, width))


def _grouped(draw: Draw, length: int | None = None) -> dict[str, Tensor]:
    return {name: draw(B, length or T, heads, K) for name, heads in (("q", 2 * H), ("k", H), ("v", H))}


def _memory(draw: Draw) -> dict[str, Tensor]:
    q, k = (F.normalize(draw(B, T, H, K), dim=-1) for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": draw(B, T, H, K),
        "beta": draw(B, T, H).sigmoid(),
        "log_decay": -0.1 * draw(B, T, H).abs(),
    }


def _ssd(draw: Draw) -> dict[str, Tensor]:
    return {
        "q": draw(B, T, 1, K),
        "k": draw(B, T, 1, K),
        "v": draw(B, T, H, K),
        "log_decay": -0.1 * draw(B, T, H).abs(),
    }


def _scan(draw: Draw) -> dict[str, Tensor]:
    return {
        "x": draw(B, T, D),
        "dt": 0.2 * draw(B, T, D).abs(),
        "A": -draw(D, N).abs(),
        "B": draw(B, T, N),
        "C": draw(B, T, N),
    }


def _wkv4(draw: Draw) -> dict[str, Tensor]:
    return {"k": draw(B, T, D), "v": draw(B, T, D), "decay": draw(D).exp(), "bonus": draw(D)}


def _wkv6(draw: Draw, values: int = K) -> dict[str, Tensor]:
    r, k, v, decay = (draw(B, T, H, width) for width in (K, K, values, K))
    return {"r": r, "k": k, "v": v, "log_decay": -(decay - 2).exp(), "bonus": draw(H, K)}


def _wkv7(draw: Draw) -> dict[str, Tensor]:
    # As RWKV-7 makes them: log decays of at least -exp(-1/2), b is minus a times a rate in 0..1.
    r, decay, k, v, rate = (draw(B, T, H, K) for _ in range(5))
    a = -F.normalize(draw(B, T, H, K), dim=-1)
    return {"r": r, "log_decay": -0.6 * decay.sigmoid(), "k": k, "v": v, "a": a, "b": -a * rate.sigmoid()}


def _taylor(draw: Draw) -> dict[str, Tensor]:
    return {"q": draw(2 * B, T, H, N), "k": draw(2 * B, T, H, N), "v": draw(2 * B, T, H, K)}


def _taps(draw: Draw) -> dict[str, Tensor]:
    return {"x": draw(B, T, D), "weight": 0.5 * draw(D, 4), "bias": draw(D)}


def _filter(draw: Draw) -> dict[str, Tensor]:
    return {"u": draw(B, T, D), "filter": draw(T, D)}


def _head(draw: Draw) -> dict[str, Tensor]:
    return {"hidden": draw(B * T, D), "weight": draw(V, D)}


def _op_by_backend(
    op: Function,
    definition: Function,
    inputs: Callable[[Draw], Mapping[str, Tensor]],
    families: Mapping[str, ModuleType],
    *wide: str,
) -> Op:
    """An op whose `backend` says what runs."""
    kernels, plain, numba = (partial(op, backend=backend) for backend in ("triton", "eager", "numba"))
    return Op(
        kernels=kernels,
        numba=numba if "cpu" in families else None,
        plain=plain,
        definition=definition,
        inputs=inputs,
        wide=wide,
        families=families,
    )


def _seventh(op: Function, half: bool = False) -> Op:
    return Op(
        kernels=op,
        plain=wkv7_eager.wkv7,
        definition=wkv7_reference.wkv7,
        inputs=_wkv7,
        cuda=True,
        half=half,
        families=wkv7_families,
    )


def _attention(window: int | None, length: int | None = None) -> Op:
    return Op(
        plain=partial(attention, window=window),
        definition=partial(attention_reference.attention, scale=K**-0.5, window=window),
        inputs=partial(_grouped, length=length),
        families=attention_families,
    )


def _chunks(mode: Mode, chunk: int = 64, inputs: Callable[[Draw], Mapping[str, Tensor]] = _choices) -> Op:
    op, definition = (partial(function, chunk=chunk, mode=mode) for function in (top1_chunk, _dense))
    return _op_by_backend(op, definition, inputs, chunk_families)


OPS: dict[str, Op] = {
    "top1-chunk exact": _chunks("exact"),
    "top1-chunk approx": _chunks("approx"),
    # The sizes for which Hopper GPUs have kernels of their own.
    "top1-chunk exact, heads of 64": _chunks("exact", 128, partial(_wide_choices, width=64)),
    "top1-chunk approx, heads of 64": _chunks("approx", 128, partial(_wide_choices, width=64)),
    "top1-chunk exact, heads of 128": _chunks("exact", 128, partial(_wide_choices, width=128)),
    "top1-chunk approx, heads of 128": _chunks("approx", 128, partial(_wide_choices, width=128)),
    "top1-element": _op_by_backend(top1_element, _element, _choices, element_families),
    "delta rule": _op_by_backend(
        delta_rule, delta_rule_reference.delta_rule, _memory, delta_rule_families, "beta", "log_decay"
    ),
    "ssd": _op_by_backend(ssd, ssd_reference.ssd, _ssd, ssd_families, "log_decay"),
    "selective scan": _op_by_backend(
        selective_scan, selective_scan_reference.selective_scan, _scan, scan_families, "dt", "A"
    ),
    "wkv4": _op_by_backend(wkv4, wkv4_reference.wkv4, _wkv4, wkv4_families),
    "wkv6": _op_by_backend(wkv6, wkv6_reference.wkv6, _wkv6, wkv6_families),
    "wkv6 by tokens, heads of 96": _op_by_backend(wkv6, wkv6_reference.wkv6, partial(_wkv6, values=96), wkv6_families),
    "wkv7": _seventh(wkv7),
    "wkv7 bounded": _seventh(wkv7_bounded, half=True),
    "taylor attention": Op(
        kernels=partial(taylor_attention, backend="triton"),
        # The kernels' own chunks: what goes through sums of features is rounded otherwise than through scores.
        plain=partial(taylor_eager.taylor_attention, chunk=taylor_operators.CHUNK),
        definition=taylor_reference.taylor_attention,
        inputs=_taylor,
        families=taylor_families,
    ),
    "short convolution": _op_by_backend(
        partial(short_convolution, activation="silu"),
        partial(short_convolution_reference.short_convolution, activation="silu"),
        _taps,
        short_convolution_families,
        "weight",
        "bias",
    ),
    "linear cross entropy": Op(
        kernels=partial(_loss, partial(linear_cross_entropy, backend="triton")),
        plain=partial(_loss, partial(linear_cross_entropy, backend="eager")),
        definition=partial(_loss, linear_cross_entropy_reference.linear_cross_entropy),
        inputs=_head,
        families=linear_cross_entropy_families,
    ),
    "attention": _attention(None),
    "attention window": _attention(50),
    # On a GPU, lengths of whole tiles run on FlexAttention.
    "attention window, whole tiles": replace(
        _attention(50, length=256),
        kernels=partial(attention, window=50),
        plain=partial(attention_families["eager"].attention, scale=K**-0.5, window=50, slopes=None, segments=None),
        cuda=True,
    ),
    "long convolution": _op_by_backend(
        long_convolution, long_convolution_reference.long_convolution, _filter, long_convolution_families, "filter"
    ),
}


def check_op(name: str, device: torch.device) -> list[dict[str, Any]]:
    """Compare an op with its definition in float64, outputs and gradients; one row per tensor and dtype.

    Args:
        name: one of `OPS`.
        device: where to run.

    Returns:
        Rows by implementation, with the tensor's name, what ran (`path`, as in `IMPLEMENTATIONS`), its relative error,
        that of what it is compared with (`beside`), and the result, "passed" or what is wrong.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in OPS:
        raise ConfigError(f"unknown op {name!r}: {nearest(name, OPS)}")
    op = OPS[name]
    generator = torch.Generator().manual_seed(0)
    drawn = op.inputs(lambda *shape: torch.randn(shape, generator=generator))
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        inputs = {key: x.to(device, torch.float32 if key in op.wide else dtype) for key, x in drawn.items()}
        tensors = list(inputs.values())
        truth = _results(op.definition, [x.double() for x in tensors])
        for function in op.runnable(tensors[0]):
            with recorded() as ran:
                found = _results(function, tensors)
            path = next(iter(ran.values()), None)  # the op itself; ops that it calls come after it
            judge: Callable[[str, Tensor, Tensor, Tensor], None]
            if function is op.plain:
                if op.kernels is not None:
                    reason = op.without_kernels(tensors[0])
                    path = PLAIN if reason is None else f"{PLAIN}: {reason}"
                judge = _assert_as_accurate_in_the_mean
                beside = _results(op.definition, [x.to(dtype) for x in tensors])  # it takes one dtype
            else:
                judge, beside = assert_as_accurate, _results(op.plain, tensors)
                if op.half:
                    found, beside = ([x.to(dtype) for x in results] for results in (found, beside))
            outputs = ["o", "state"][: len(truth) - len(inputs)]
            labels = [*outputs, *(f"d{key}" for key in inputs)]
            row: dict[str, Any] = {"op": name, "dtype": str(dtype), "path": path}
            rows += [row | _judged(judge, *parts) for parts in zip(labels, found, beside, truth, strict=True)]
    return rows


def unchecked(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the implementations that are missing in `rows` of `check_op`: name to the ops that have it."""
    groups: dict[int, list[str]] = {}  # entries that choose from the same families are one op
    for name in {row["op"]: None for row in rows}:
        groups.setdefault(id(OPS[name].families), []).append(name)
    found: dict[str, list[str]] = {}
    for names in groups.values():
        ran = {row["path"].partition(":")[0] for row in rows if row["op"] in names}
        for runs in (family.RUNS for family in OPS[names[0]].families.values()):
            if runs not in ran:
                found.setdefault(runs, []).append(names[0])
    return found


def _judged(judge: Callable[..., None], label: str, x: Tensor, y: Tensor, z: Tensor) -> dict[str, Any]:
    """Return the part of a row about tensor `label`: the errors of `x` and `y` relative to the true `z`."""
    row = {"tensor": label, "result": "passed", "error": relative_error(x, z), "beside": relative_error(y, z)}
    try:
        judge(label, x, y, z)
    except AssertionError as error:
        row["result"] = str(error)
    return row


def _assert_as_accurate_in_the_mean(label: str, found: Tensor, beside: Tensor, truth: Tensor) -> None:
    error = relative_error(found, truth)
    allowed = 2 * relative_error(beside, truth) + 2 * torch.finfo(found.dtype).eps
    assert error <= allowed, f"{label} errs by {error:.3g} of its norm; at most {allowed:.3g} is allowed"


def _results(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs and the gradients of a random weighting of them."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, leaves, weights))]
