"""The proofs of the conformance suite in float64: each yields the checks of one property.

`_bench.py` says what is excused as rounding; nothing here has a tolerance of its own.
"""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from basecap.mixers import Cache, Mixer, declared_cost, initialise
from basecap.ops import Influence
from basecap.testing import _causality
from basecap.testing._bench import BATCH, Bench, Check, Layers, empty_cache, largest, roundoff


def shape(bench: Bench) -> Check:
    """Return the check that forward gives [B, T, D] like its input: a width of 1 would be broadcast ever after."""
    found = list(bench.y.shape) if isinstance(bench.y, Tensor) else type(bench.y).__name__
    wanted = list(bench.x.shape)
    return bench.check(
        "shape", float(found != wanted), 0.0, f"forward must return [B, T, D] like x, {wanted}, not {found}"
    )


def finite(bench: Bench) -> Check:
    """Return the check that forward gives real finite numbers: NaN differs from itself and would look like a leak."""
    y = bench.y
    if not y.is_floating_point():
        broken = f"forward must return real floating-point numbers like x, {bench.x.dtype}, not {y.dtype}"
        return bench.check("finite", 1.0, 0.0, broken)
    wrong = (~y.isfinite()).nonzero()
    row, position = wrong[0, :2].tolist() if len(wrong) else (0, 0)
    broken = (
        f"forward gives NaN or infinity in {len(wrong)} of {y.numel()} places, first at position {position} of row "
        f"{row}, for inputs that are normally distributed; look for what divides by zero or overflows"
    )
    return bench.check("finite", len(wrong), 0.0, broken)


def untouched(bench: Bench) -> Check:
    """Return the check that forward leaves its input alone, which the blocks around a mixer still need."""
    broken = "forward writes into its input; write x = x + 0.1 in the place of x += 0.1, or work on a copy"
    return bench.check("input untouched", float(bench.wrote), 0.0, broken)


@torch.no_grad()
def repetition(bench: Bench) -> Check:
    """Return the check that the same input gives the same output; GPUs may add up in another order."""
    again = bench.layers(bench.x)
    error = 0.0 if torch.equal(again, bench.y) else largest(again, bench.y)
    allowed = roundoff(torch.float64) * bench.slack(torch.float64)
    return bench.check("repetition", error, allowed, "the same input twice gives two outputs; take out what is random")


@torch.no_grad()
def causality(bench: Bench) -> Iterator[Check]:
    """Later inputs change no earlier output; a shorter sequence (one token, off every chunk) is a prefix."""
    other = bench.random("other future", *bench.x.shape)
    for cut in sorted(_causality.choose_cuts(bench.length)):
        probe = _causality.future(bench.x, other, bench.weight, [cut] * BATCH)
        broken = f"outputs before position {cut} move when later inputs change"
        yield bench.still(f"causality before {cut}", *probe.movement(bench.layers, bench.y), broken)
        yield bench.same(
            f"length {cut}",
            bench.layers(bench.x[:, :cut]),
            bench.y[:, :cut],
            f"a sequence of {cut} tokens is not mixed like the start of one of {bench.length}",
        )
    cut = bench.length // 3
    probe = _causality.future(bench.x, other, bench.weight, [cut] * BATCH)
    broken = f"outputs before position {cut} move when later inputs change, after eval()"
    bench.layers.eval()
    yield bench.still("causality in evaluation mode", *probe.movement(bench.layers), broken)
    bench.layers.train()


def causal_gradients(bench: Bench) -> Iterator[Check]:
    """Earlier outputs have no gradient with respect to later inputs."""
    cut, other = bench.length // 3, bench.random("other future", *bench.x.shape)
    probe = _causality.future(bench.x, other, bench.weight, [cut] * BATCH)
    broken = f"outputs before position {cut} move when later inputs change, where gradients are wanted"
    yield bench.still("causality with gradients", *probe.movement(bench.layers), broken)
    broken = f"outputs before position {cut} have gradients with respect to inputs after it"
    yield bench.still("causal gradients", *probe.gradient(bench.layers), broken)


@torch.no_grad()
def decoding(bench: Bench) -> Iterator[Check]:
    """Step by step, as a prompt, and as a prompt followed by steps, a sequence is mixed as by forward."""
    T, x = bench.length, bench.x.clone()
    for prompt in (0, 1, T // 2, T):
        caches = bench.layers.init_cache(BATCH, T)
        y = decode(bench.layers, x, caches, prompt)
        if not torch.equal(x, bench.x):
            broken = "prefill writes into its input" if prompt else "step writes into its input"
            yield bench.check("input of decoding untouched", 1.0, 0.0, f"{broken}; work on a copy")
            return
        name = "decode" if prompt == 0 else "prefill" if prompt == T else f"prefill {prompt}, then decode"
        yield bench.same(name, y, bench.y, f"{name} and forward disagree")
        lengths = {cache.length for cache in caches}
        broken = f"the cache says {sorted(lengths)} tokens after {T}"
        yield bench.check(f"{name}: cache length", float(lengths != {T}), 0.0, broken)


def decode(layers: Layers, x: Tensor, caches: list[Cache], prompt: int) -> Tensor:
    parts = [layers.prefill(x[:, :prompt], caches)] if prompt else []
    parts += [layers.step(x[:, t : t + 1], caches) for t in range(prompt, x.shape[1])]
    return torch.cat(parts, dim=1)


@torch.no_grad()
def long_causality(bench: Bench) -> Iterator[Check]:
    """Causality where a block or a window of the usual sizes is not the first: one row, two places off every grid.

    What it says is of a layer that is not the first either, so that a fault may come from there.
    """
    T, x, cut = bench.length, bench.x, bench.length - bench.length // 32
    probe = _causality.future(x, bench.random("other future", *x.shape), bench.weight, [cut])
    broken = f"outputs before position {cut} of {T} move when later inputs change (layer.index is 1)"
    yield bench.still(f"causality before {cut} of {T}", *probe.movement(bench.layers, bench.y), broken)
    cut = 2 * T // 3
    broken = f"a sequence of {cut} tokens is not mixed like the start of one of {T} (layer.index is 1)"
    yield bench.same(f"length {cut} of {T}", bench.layers(bench.x[:, :cut]), bench.y[:, :cut], broken)


@torch.no_grad()
def long_decoding(bench: Bench) -> Iterator[Check]:
    """A long prompt followed by steps is mixed as by forward."""
    T = bench.length
    prompt = T - T // 13  # of 1,100 tokens 1,016: the steps cross 1,024
    end = min(T, prompt + 16)
    caches = bench.layers.init_cache(bench.batch, T)
    name = f"prefill {prompt}, then decode to {end} of {T}"
    y = decode(bench.layers, bench.x[:, :end], caches, prompt)
    yield bench.same(name, y, bench.y[:, :end], f"{name} and forward disagree (layer.index is 1)")


@torch.no_grad()
def packing(bench: Bench) -> Iterator[Check]:
    """Packed segments are mixed as separate sequences."""
    packed = bench.layers(bench.x, bench.segments())
    yield bench.same(
        "packed segments", packed, _apart(bench), "a packed segment is not mixed like a sequence of its own"
    )
    one = torch.full((BATCH, bench.length), 7, dtype=torch.int64, device=bench.device)
    yield bench.same("one segment", bench.layers(bench.x, one), bench.y, "one segment over all is not mixed like none")


def _apart(bench: Bench) -> Tensor:
    rows = []
    for x_TD, ids in zip(bench.x, bench.segments(), strict=True):
        _, counts = ids.unique_consecutive(return_counts=True)
        rows.append(torch.cat([bench.layers(part[None])[0] for part in x_TD.split(counts.tolist())]))
    return torch.stack(rows)


def packed_gradients(bench: Bench) -> Iterator[Check]:
    """The outputs of a packed segment have no gradient with respect to the inputs of another."""
    probe = _causality.documents(bench.x, bench.x, bench.weight, bench.segments(), [2] * BATCH)
    broken = "the outputs of one segment have gradients with respect to another"
    yield bench.still("packed gradients", *probe.gradient(bench.layers), broken)


@torch.no_grad()
def batches(bench: Bench) -> Iterator[Check]:
    """A row is mixed the same whatever else is in the batch; a batch may be empty."""
    alone = torch.cat([bench.layers(row[None]) for row in bench.x])
    yield bench.same("batch invariance", alone, bench.y, "a row alone is not mixed like a row of a batch")
    shape = bench.layers(bench.x[:0]).shape
    broken = f"a batch of no rows becomes {list(shape)}"
    yield bench.check("empty batch", float(shape != bench.x[:0].shape), 0.0, broken)


def derivatives(bench: Bench) -> Iterator[Check]:
    """Backward is the derivative of forward: central differences along a random direction per parameter."""
    grads = gradients(bench.layers, bench.x, bench.weight)
    lost = sorted(dict(bench.layers.named_parameters()).keys() - grads.keys())
    yield bench.check("every parameter learns", len(lost), 0.0, f"no gradient reaches {', '.join(lost)}")
    if not all(mixer.exact_gradient for mixer in bench.layers.mixers):
        return
    point = {"x": bench.x, **{name: p.detach() for name, p in bench.layers.named_parameters()}}
    name, error, allowed = worst([(name, *_along(bench, point, name, grad)) for name, grad in grads.items()])
    yield bench.check("derivatives", error, allowed, f"the gradient of {name} is not the derivative")


def worst(rows: list[tuple[str, float, float]]) -> tuple[str, float, float]:
    """Return the (name, error, allowed) with the largest share of what is allowed, a NaN before all others."""
    return max(rows, key=lambda row: math.inf if math.isnan(row[1]) else row[1] / row[2])


@torch.no_grad()
def _along(bench: Bench, point: Mapping[str, Tensor], name: str, grad: Tensor) -> tuple[float, float]:
    """Return (error, allowed) of one directional derivative, both relative to the size of the gradient."""
    direction = bench.random(f"direction {name}", *point[name].shape)

    def loss(distance: float) -> tuple[float, float]:
        there = {**point, name: point[name] + distance * direction}
        terms = torch.func.functional_call(bench.layers, there, (there.pop("x"),)) * bench.weight
        return terms.sum().item(), terms.abs().sum().item()

    h = 1e-6
    (ahead, size), (behind, _) = loss(h), loss(-h)
    (far_ahead, _), (far_behind, _) = loss(2 * h), loss(-2 * h)
    near, far = (ahead - behind) / (2 * h), (far_ahead - far_behind) / (4 * h)
    # Richardson: (near - far) / 3 is the truncation error of `near`; the loss itself is known to rounding.
    error, truncation = abs(near - (grad * direction).sum().item()), abs(near - far) / 3
    allowed = bench.slack(torch.float64) * truncation + bench.allowed * size / h
    scale = max(torch.linalg.vector_norm(grad).item(), torch.finfo(torch.float64).tiny)
    return error / scale, allowed / scale


def gradients(
    layers: nn.Module, x: Tensor, weight: Tensor, run: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the gradients of sum(weight * layers(x)) by parameter name, and that of the input as "x".

    Parameters that no gradient reaches are left out. `run` stands for a compiled form of `layers`.
    """
    x = x.detach().clone().requires_grad_()
    wanted = {"x": x, **dict(layers.named_parameters())}
    y = layers(x) if run is None else run(x)
    loss = (y.to(weight.dtype) * weight).sum()
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {name: grad for name, grad in zip(wanted, grads, strict=True) if grad is not None}


def state_bytes(bench: Bench) -> Iterator[Check]:
    """The declared state is the built one, in any dtype."""
    mixer = bench.layers.mixers[0]
    for dtype in (torch.float32, torch.bfloat16):
        built = bench.choice.mixer(bench.config, mixer.layer).to(dtype)
        for length in (1, bench.length, 10 * bench.length):
            said, measured = declared_cost(built, "state_bytes", length), empty_cache(built, 1, length).nbytes
            broken = f"state_bytes({length}) says {said}, init_cache holds {measured} bytes ({dtype})"
            yield bench.check(f"state bytes at {length}, {dtype}", abs(said - measured), 0.0, broken)


def flops(bench: Bench) -> Iterator[Check]:
    """The declared FLOPs cover every linear layer and grow with length."""
    mixer = bench.layers.mixers[0]
    linear = sum(m.weight.numel() for m in mixer.modules() if isinstance(m, nn.Linear))
    T = bench.length
    least, single, doubled = 2.0 * T * linear, declared_cost(mixer, "flops", T), declared_cost(mixer, "flops", 2 * T)
    missing = max(0.0, least - single) / max(least, 1.0)
    yield bench.check("flops cover the linear layers", missing, 0.0, f"flops({T}) = {single:.3g} is below {least:.3g}")
    shrinking = max(0.0, 2 * single - doubled) / max(single, 1.0)
    yield bench.check("flops grow", shrinking, roundoff(torch.float32), f"flops({2 * T}) is below twice flops({T})")


@torch.no_grad()
def influence(bench: Bench) -> Iterator[Check]:
    """The influence matrix, where there is one, is causal and maps the values to what forward mixes."""
    mixer, T = bench.layers.mixers[0], bench.length // 2
    x = bench.x[:, :T]
    found = mixer.influence(x)
    if found is None:
        return
    known = isinstance(found, Influence)
    matrix = found.whole() if known else torch.empty(0)
    shape = tuple(matrix.shape)
    square = known and shape == (BATCH, found.shape[1], T, T) and found.shape == (BATCH, shape[1], T)
    wrong = f"its factors are {list(shape)}" if known else f"is a {type(found).__name__}; return basecap.ops.Influence"
    yield bench.check("influence shape", float(not square), 0.0, f"influence: {wrong}, not [{BATCH}, H, {T}, {T}]")
    if not square:
        return
    future = matrix.triu(1)
    error = largest(future, torch.zeros_like(future), scale=matrix)
    yield bench.check("influence is causal", error, bench.allowed, "later values have influence")
    mixed = mixer.mixed(x)
    if mixed is not None:
        values, y = mixed
        product = torch.einsum("bhts,bshv->bthv", matrix, values)
        # Rounding is relative to the terms of a sum, which may cancel.
        terms = torch.einsum("bhts,bshv->bthv", matrix.abs(), values.abs())
        broken = "influence times the values is not what forward mixes"
        yield bench.check("influence", largest(product, y, scale=terms), bench.allowed, broken)


def recipes(bench: Bench) -> Iterator[Check]:
    """Every parameter has a recipe (else `initialise` refuses), and nothing but parameters differs between builds."""
    starts = []
    for _ in range(2):
        mixer: Mixer = bench.choice.mixer(bench.config, bench.layers.mixers[0].layer)
        initialise(mixer, mixer.recipe(), bench.seed)
        starts.append({**dict(mixer.named_parameters()), **dict(mixer.named_buffers())})
    changed = [name for name, value in starts[0].items() if not torch.equal(value, starts[1][name])]
    broken = f"two initialisations from one seed differ in {', '.join(changed)}; let recipe() draw, __init__ must not"
    yield bench.check("recipe", len(changed), 0.0, broken)
    again = Layers(bench.choice, bench.config, bench.hidden, bench.length).to(bench.device, torch.float64)
    again.load_state_dict(bench.layers.state_dict())
    with torch.no_grad():
        y = again(bench.x)
    broken = "another build with the same parameters gives another output; __init__ keeps a tensor that is no parameter"
    yield bench.same("built again", y, bench.y, broken)


LONG_PROOFS: tuple[Callable[[Bench], Iterator[Check]], ...] = (long_causality, long_decoding)

PROOFS: tuple[Callable[[Bench], Iterator[Check]], ...] = (
    recipes,
    causality,
    causal_gradients,
    decoding,
    packing,
    packed_gradients,
    batches,
    derivatives,
    state_bytes,
    flops,
    influence,
)
