"""The proofs of the conformance suite in float64: each yields the checks of one property.

`_harness.py` defines the only tolerance, which is for rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from basecap.mixers import Cache, Mixer, declared_cost, initialise
from basecap.ops import Influence
from basecap.testing import _causality
from basecap.testing._derivatives import derivatives
from basecap.testing._harness import BATCH, SEED, Check, Harness, Layers, empty_cache, largest, roundoff
from basecap.testing._narrowing import float64
from basecap.testing._unequal import unequal_prompts

#: Begins messages about the long test sequence, which is tested in the second layer.
LATER = "with layer.index 1"
#: Sequences in a pass where there are many: what a large state computes with fits into the processor's cache.
ROWS = 4
#: Rows of the batch that smaller ones are compared with.
LARGE_BATCH = 16


def shape(harness: Harness) -> Check:
    """Return the check that forward gives [B, T, D] like its input: a width of 1 would be broadcast silently."""
    found = list(harness.y.shape) if isinstance(harness.y, Tensor) else type(harness.y).__name__
    wanted = list(harness.x.shape)
    broken = f"{harness.place('forward')} must return [B, T, D] like x, {wanted}, not {found}"
    return harness.check("shape", float(found != wanted), 0.0, broken)


def finite(harness: Harness) -> Check:
    """Return the check that forward gives real finite numbers: NaN differs from itself and would look like a leak."""
    y, forward = harness.y, harness.place("forward")
    if not y.is_floating_point():
        broken = f"{forward} must return real floating-point numbers like x, {harness.x.dtype}, not {y.dtype}"
        return harness.check("finite", 1.0, 0.0, broken)
    wrong = (~y.isfinite()).nonzero()
    row, position = wrong[0, :2].tolist() if len(wrong) else (0, 0)
    broken = (
        f"{forward} returns NaN or infinity in {len(wrong)} of {y.numel()} elements, first at position {position} of "
        f"row {row}, for normally distributed inputs; look for a division by zero or an overflow"
    )
    return harness.check("finite", len(wrong), 0.0, broken)


def untouched(harness: Harness) -> Check:
    """Return the check that forward leaves its input alone, which the blocks around a mixer still need."""
    forward = harness.place("forward")
    broken = f"{forward} modifies its input; write x = x + 0.1 instead of x += 0.1, or work on a copy"
    return harness.check("input untouched", float(harness.wrote), 0.0, broken)


@torch.no_grad()
def repetition(harness: Harness) -> Check:
    """Return the check that the same input gives the same output; GPUs may add up in another order."""
    again = harness.layers(harness.x)
    error = 0.0 if torch.equal(again, harness.y) else largest(again, harness.y)
    allowed = roundoff(torch.float64) * harness.slack(torch.float64)
    advice = "; remove what is random or kept from one call to the next"
    if error > allowed:
        with evaluation(harness.layers):
            before = harness.layers(harness.x)
            harness.layers(harness.random("another call", *harness.x.shape))
            if torch.equal(harness.layers(harness.x), before):
                advice = (
                    " in training mode only; for these checks, set the dropout to 0 in the attribute `tiny`, or remove "
                    "what is kept from one call to the next"
                )
    broken = f"{harness.place('forward')} gives different outputs for the same input{advice}"
    return harness.check("repetition", error, allowed, broken)


@contextmanager
def evaluation(layers: Layers) -> Iterator[None]:
    """Set evaluation mode in a block."""
    layers.eval()
    try:
        yield
    finally:
        layers.train()


@torch.no_grad()
def causality(harness: Harness) -> Iterator[Check]:
    """Later inputs change no earlier output; a shorter sequence gives the start of the longer one."""
    for cut in sorted(_causality.choose_cuts(harness.length)):
        yield _sees_no_future(harness, cut)
        yield harness.same(
            f"length {cut}",
            harness.layers(harness.x[:, :cut]),
            harness.y[:, :cut],
            _of_length(harness, cut),
        )
    with evaluation(harness.layers):
        y = harness.layers(harness.x)
        cuts = [harness.length // 3]
        if largest(y, harness.y) > harness.allowed:
            cuts.append(harness.first_apart(y, harness.y) + 1)
        for cut in cuts:
            broken = (
                f"{harness.place('forward')} sees the future in evaluation mode only: outputs before position {cut} "
                "change with later inputs"
            )
            moved = _future(harness, cut).movement(harness.layers, y)
            yield harness.check_zero("causality in evaluation mode", *moved, broken)


def _future(harness: Harness, cut: int) -> _causality.Probe:
    other = harness.random("other future", *harness.x.shape)
    return _causality.future(harness.x, other, harness.weight, [cut] * harness.batch)


def _sees_no_future(harness: Harness, cut: int, where: str = "", of: str = "") -> Check:
    probe = _future(harness, cut)
    moved, size = probe.movement(harness.layers, harness.y)
    mode = ""
    if moved.abs().max() > harness.allowed * size:
        with evaluation(harness.layers):
            other, other_size = probe.movement(harness.layers)
        mode = " in training mode only" if other.abs().max() <= harness.allowed * other_size else ""
    outputs = f"{where}outputs before position {cut}{of}"
    broken = f"{harness.place('forward')} sees the future{mode}: {outputs} change with later inputs"
    return harness.check_zero(f"causality before {cut}{of}", moved, size, broken)


def _of_length(harness: Harness, cut: int) -> str:
    return (
        f"{harness.place('forward')} gives another output for the first {cut} of {harness.length} tokens than for the "
        "whole sequence"
    )


def causal_gradients(harness: Harness) -> Iterator[Check]:
    """Earlier outputs have no gradient with respect to later inputs."""
    cut = harness.length // 3
    probe = _future(harness, cut)
    forward = harness.place("forward")
    x = harness.x.clone().requires_grad_()
    y = harness.layers(x)
    grad = torch.autograd.grad(y.sum(), x, allow_unused=True)[0] if y.requires_grad else None
    broken = f"the output of {forward} has no gradient in its input; do not use torch.no_grad, detach or NumPy there"
    yield harness.check("output has a gradient", float(grad is None), 0.0, broken)
    wrong = 0 if grad is None else int((~grad.isfinite()).sum())
    broken = (
        f"the output of {forward} is finite, but its gradient is NaN or infinite in {wrong} of {x.numel()} elements of "
        "the input; look for a root of 0, or a division by 0 in what torch.where or a mask leaves out"
    )
    yield harness.check("finite gradient", wrong, 0.0, broken)
    broken = (
        f"{forward} sees the future if gradients are enabled: outputs before position {cut} change with later inputs"
    )
    yield harness.check_zero("causality with gradients", *probe.movement(harness.layers), broken)
    broken = f"outputs of {forward} before position {cut} have gradients with respect to inputs after it"
    yield harness.check_zero("causal gradients", *probe.gradient(harness.layers), broken)


@torch.no_grad()
def decoding(harness: Harness) -> Iterator[Check]:
    """Decoding by steps, by prefill, and by prefill followed by steps equals forward."""
    T, x = harness.length, harness.x.clone()
    for prompt in (0, 1, T // 2, T):
        caches = harness.layers.init_cache(BATCH, T)
        y = decode(harness.layers, x, caches, prompt)
        if not torch.equal(x, harness.x):
            broken = f"{harness.place('prefill' if prompt else 'step')} modifies its input"
            yield harness.check("input of decoding untouched", 1.0, 0.0, f"{broken}; work on a copy")
            return
        name = "decode" if prompt == 0 else "prefill" if prompt == T else f"prefill {prompt}, then decode"
        lengths = {cache.length for cache in caches}
        found = ", ".join(map(str, sorted(lengths)))
        broken = (
            f"cache.length is {found} after {T} tokens; {harness.place('step')} must add 1, and a prefill of your own "
            "the length of the prompt"
        )
        yield harness.check(f"{name}: cache length", float(lengths != {T}), 0.0, broken)
        yield _decodes(harness, name, y, prompt)
    if all(mixer.continues for mixer in harness.layers.mixers):
        caches, cut = harness.layers.init_cache(BATCH, T), T // 3
        y = torch.cat([harness.layers.prefill(part, caches) for part in x.split([cut, T - cut], dim=1)], dim=1)
        broken = f"the output of {harness.place('prefill')} after another one differs from forward; leave out continues"
        yield harness.same(f"prefill {cut}, then the rest", y, harness.y, broken)


def _decodes(harness: Harness, name: str, y: Tensor, prompt: int, where: str = "", of: str = "") -> Check:
    """Return the check that `y`, decoded, is the start of forward's output, or that forward leaks where they differ.

    Causality is tested at a few positions; decoding has not read what follows, so it shows a leak at any other.
    """
    step, prefill = harness.place("step"), harness.place("prefill")
    how = step if prompt == 0 else prefill if prompt == harness.length else f"{step} after a prefill of {prompt} tokens"
    expected, broken = (
        harness.y[:, : y.shape[1]],
        f"the output of {how} differs from that of {harness.place('forward')}",
    )
    found = harness.same(name, y, expected, where + broken)
    if found.passed or y.shape != expected.shape:
        return found
    leak = _sees_no_future(harness, harness.first_apart(y, expected) + 1, where, of)
    return found if leak.passed else leak


def decode(layers: Layers, x: Tensor, caches: list[Cache], prompt: int) -> Tensor:
    parts = [layers.prefill(x[:, :prompt], caches)] if prompt else []
    parts += [layers.step(x[:, t : t + 1], caches) for t in range(prompt, x.shape[1])]
    return torch.cat(parts, dim=1)


@torch.no_grad()
def long_causality(harness: Harness) -> Iterator[Check]:
    """Causality beyond the first block or window of the usual sizes, at two positions that no block size divides.

    The layer is the second of its model, so a fault may also depend on `layer.index`.
    """
    T = harness.length
    yield _sees_no_future(harness, T - T // 32, f"{LATER}, ", f" of {T}")
    cut = 2 * T // 3
    broken = f"{LATER}, {_of_length(harness, cut)}"
    yield harness.same(f"length {cut} of {T}", harness.layers(harness.x[:, :cut]), harness.y[:, :cut], broken)


@torch.no_grad()
def long_decoding(harness: Harness) -> Iterator[Check]:
    """A long prompt followed by steps equals forward."""
    T = harness.length
    prompt = T - T // 13  # of 1,100 tokens 1,016: the steps cross 1,024
    end = min(T, prompt + 16)
    caches = harness.layers.init_cache(harness.batch, T)
    name = f"prefill {prompt}, then decode to {end} of {T}"
    y = decode(harness.layers, harness.x[:, :end], caches, prompt)
    yield _decodes(harness, name, y, prompt, f"{LATER}, ", f" of {T}")


@torch.no_grad()
def packing(harness: Harness) -> Iterator[Check]:
    """The output of a packed segment equals that of a separate sequence; segments begin and end at every position."""
    own = _causality.runs(harness.length, harness.length // 2).to(harness.device)
    position = torch.arange(harness.length, device=harness.device)
    begins = own != own.roll(1, 1)
    begins[:, 0] = True
    within = position - torch.where(begins, position, 0).cummax(1).values
    parity = own.long()
    yield harness.same(
        "packed segments",
        _in_parts(harness, harness.x[parity, within], begins.cumsum(1)),
        harness.y[parity, within],
        f"{harness.place('forward')} mixes packed documents, which begin where `segments` changes: the output of one "
        "differs from that of a separate sequence",
    )
    one = torch.full((BATCH, harness.length), 7, dtype=torch.int64, device=harness.device)
    yield harness.same(
        "one segment",
        harness.layers(harness.x, one),
        harness.y,
        "the output with one segment for the whole row differs from that without segments",
    )


def _in_parts(harness: Harness, x: Tensor, segments: Tensor | None) -> Tensor:
    """Return the outputs of many packed sequences, without the memory that all of them at once would need."""
    assert segments is not None
    return torch.cat([harness.layers(*part) for part in zip(x.split(ROWS), segments.split(ROWS), strict=True)])


def packed_gradients(harness: Harness) -> Iterator[Check]:
    """The outputs of a packed segment have no gradient with respect to the inputs of another."""
    own = _causality.runs(harness.length, harness.length // 8).to(harness.device)
    x, weight = (harness.random(f"packed {name}", len(own), *harness.x.shape[1:]) for name in ("x", "weight"))
    probe = _causality.packed(x, x, weight, own)
    broken = f"outputs of {harness.place('forward')} in one segment have gradients with respect to another"
    yield harness.check_zero("packed gradients", *probe.gradient(partial(_in_parts, harness)), broken)


@torch.no_grad()
def batches(harness: Harness) -> Iterator[Check]:
    """The output of a row does not depend on the other rows, nor on their number."""
    alone = torch.cat([harness.layers(row[None]) for row in harness.x])
    forward = harness.place("forward")
    broken = f"{forward} mixes the rows of a batch: the output of a row alone differs from its output in a batch"
    yield harness.same("batch invariance", alone, harness.y, broken)
    short = harness.length // 4
    x = harness.random("x of a batch", LARGE_BATCH, short, harness.hidden)
    y = harness.layers(x)
    for count in (1, 3):
        broken = f"{forward} gives another output for a row in a batch of {count} than in one of {LARGE_BATCH}"
        yield harness.same(f"batch of {count} and of {LARGE_BATCH}", harness.layers(x[:count]), y[:count], broken)


def state_bytes(harness: Harness) -> Iterator[Check]:
    """`state_bytes` equals the size of the cache, in any dtype."""
    mixer = harness.layers.mixers[0]
    for dtype in (torch.float32, torch.bfloat16):
        built = harness.choice.mixer(harness.config, mixer.layer).to(dtype)
        for length in (1, harness.length, 10 * harness.length):
            declared, measured = declared_cost(built, "state_bytes", length), empty_cache(built, 1, length).nbytes
            broken = (
                f"{harness.place('state_bytes')} returns {declared} for length {length} in {dtype}, but "
                f"{harness.place('init_cache')} makes tensors of {measured} bytes"
            )
            yield harness.check(f"state bytes at {length}, {dtype}", abs(declared - measured), 0.0, broken)


def flops(harness: Harness) -> Iterator[Check]:
    """The declared FLOPs cover every linear layer and grow with length."""
    mixer = harness.layers.mixers[0]
    place = harness.place("flops")
    linear = sum(m.weight.numel() for m in mixer.modules() if isinstance(m, nn.Linear))
    T = harness.length
    least, single, doubled = 2.0 * T * linear, declared_cost(mixer, "flops", T), declared_cost(mixer, "flops", 2 * T)
    missing = max(0.0, least - single) / max(least, 1.0)
    yield harness.check(
        "flops cover the linear layers",
        missing,
        0.0,
        f"{place} returns {single:.3g} for {T} tokens, less than the {least:.3g} of the linear layers alone",
    )
    shrinking = max(0.0, 2 * single - doubled) / max(single, 1.0)
    broken = f"{place} returns less than twice as much for {2 * T} tokens as for {T}"
    yield harness.check("flops grow", shrinking, roundoff(torch.float32), broken)


@torch.no_grad()
def influence(harness: Harness) -> Iterator[Check]:
    """The influence matrix, if there is one, is causal, and its product with the values is the mixture of forward."""
    mixer, T = harness.layers.mixers[0], harness.length // 2
    x = harness.x[:, :T]
    found = mixer.influence(x)
    if found is None:
        return
    known = isinstance(found, Influence)
    matrix = found.whole() if known else torch.empty(0)
    shape = tuple(matrix.shape)
    square = known and shape == (BATCH, found.shape[1], T, T) and found.shape == (BATCH, shape[1], T)
    wrong = f"its factors are {list(shape)}" if known else f"is a {type(found).__name__}; return basecap.ops.Influence"
    yield harness.check("influence shape", float(not square), 0.0, f"influence: {wrong}, not [{BATCH}, H, {T}, {T}]")
    if not square:
        return
    future = matrix.triu(1)
    error = largest(future, torch.zeros_like(future), scale=matrix)
    yield harness.check("influence is causal", error, harness.allowed, "later values have nonzero factors")
    mixed = mixer.mixed(x)
    if mixed is not None:
        values, y = mixed
        product = torch.einsum("bhts,bshv->bthv", matrix, values)
        # Rounding is relative to the terms of a sum, which may cancel.
        terms = torch.einsum("bhts,bshv->bthv", matrix.abs(), values.abs())
        broken = "the product of influence and values differs from the mixture"
        yield harness.check("influence", largest(product, y, scale=terms), harness.allowed, broken)


def recipes(harness: Harness) -> Iterator[Check]:
    """Every parameter has a recipe (otherwise `initialise` raises), and two builds differ in parameters only."""
    starts = []
    for _ in range(2):
        mixer: Mixer = harness.choice.mixer(harness.config, harness.layers.mixers[0].layer)
        initialise(mixer, mixer.recipe(), SEED)
        starts.append({**dict(mixer.named_parameters()), **dict(mixer.named_buffers())})
    changed = [name for name, value in starts[0].items() if not torch.equal(value, starts[1][name])]
    broken = f"two initialisations from one seed differ in {', '.join(changed)}; let recipe() draw, __init__ must not"
    yield harness.check("recipe", len(changed), 0.0, broken)
    again = Layers(harness.choice, harness.config, harness.hidden, harness.length).to(harness.device, torch.float64)
    again.load_state_dict(harness.layers.state_dict())
    with torch.no_grad():
        y = again(harness.x)
    broken = "another build with the same parameters gives another output; __init__ keeps a tensor that is no parameter"
    yield harness.same("built again", y, harness.y, broken)


#: Proofs of the declared costs, which do not depend on forward.
COSTS: tuple[Callable[[Harness], Iterator[Check]], ...] = (state_bytes, flops)

#: Proofs that the later ones depend on.
FOUNDATIONS: tuple[Callable[[Harness], Iterator[Check]], ...] = (
    float64,
    recipes,
    batches,
    causality,
    causal_gradients,
)

LONG_PROOFS: tuple[Callable[[Harness], Iterator[Check]], ...] = (long_causality, long_decoding)

PROOFS: tuple[Callable[[Harness], Iterator[Check]], ...] = (
    decoding,
    unequal_prompts,
    packing,
    packed_gradients,
    derivatives,
    influence,
)
