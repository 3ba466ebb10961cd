"""The checks of lower precision and compiled graphs, which must compute the same as float64 in eager mode."""

import warnings
from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from basecap.testing._derivatives import gradients, worst
from basecap.testing._harness import BATCH, Check, Harness, Layers, largest, root_mean_square, roundoff
from basecap.testing._proofs import decode
from basecap.testing._unequal import decode_each, each_from, way_of

#: Changes of parameters and input whose effect on gradients is averaged.
DRAWS = 4


class Lower:
    """The proofs that outputs, decoding, packing and gradients in `dtype` equal float64 up to its precision.

    They run on `device`, float64 where the harness does.
    """

    def __init__(self, harness: Harness, dtype: torch.dtype, device: torch.device):
        self.harness, self.dtype, self.device = harness, dtype, device
        self.word = str(dtype).removeprefix("torch.")
        self.layers, self.true = _copy(harness, dtype, device), _copy(harness, dtype, harness.device).double()
        self.x = harness.x.to(dtype)

    def proofs(self) -> dict[str, Callable[[], Iterator[Check]]]:
        """Return the proofs by name."""
        proofs = {"outputs": self.outputs, "decoding": self.decoding, "gradients": self.gradients}
        return {f"{name} in {self.word}": prove for name, prove in proofs.items()}

    @torch.no_grad()
    def outputs(self) -> Iterator[Check]:
        """Forward, without and with segments."""
        ids = self.harness.segments()
        x = self.x.to(self.device)
        yield from self._compare("forward", self.layers(x), self._y)
        packed = self.true(self.x.double(), ids)
        # The first tokens of a document see little, which a norm may make much of: this has an error of its own.
        allowed = self._allowed_of(packed, ids)
        yield from self._compare("packed", self.layers(x, ids.to(self.device)), packed, allowed)

    @torch.no_grad()
    def decoding(self) -> Iterator[Check]:
        """A prompt followed by steps, also prompts of different lengths."""
        length, x = self.harness.length, self.x.to(self.device)
        caches = self.layers.init_cache(BATCH, length)
        yield from self._compare("decode", decode(self.layers, x, caches, length // 2), self._y)
        expected = each_from(self._y, length)
        found = decode_each(self.layers, x, length, way_of(self.layers, length))
        yield from self._compare("decode unequal prompts", found, expected)
        if all(mixer.continues for mixer in self.layers.mixers):
            found = decode_each(self.layers, x, length, "pieces", at_once=True)
            yield from self._compare("read unequal prompts, then the rest", found, expected)

    def gradients(self) -> Iterator[Check]:
        """Gradients as in training: in 16 bits with float32 parameters under autocast."""
        yield _gradient_precision(self.harness, self.dtype, self.word, self.device)

    @cached_property
    def _y(self) -> Tensor:
        return self.true(self.x.double())

    @cached_property
    def _allowed(self) -> float:
        return self._allowed_of(self._y)

    def _allowed_of(self, y: Tensor, segments: Tensor | None = None) -> float:
        moved = self.harness.moved(self.true, self.x.double(), self.dtype, segments)
        effect = root_mean_square(moved - y) / root_mean_square(self._y)
        return self.harness.slack(self.dtype) * max(roundoff(self.dtype), effect)

    def _compare(self, name: str, actual: Tensor, expected: Tensor, allowed: float | None = None) -> Iterator[Check]:
        kept = actual.dtype == self.dtype
        broken = f"the output of {name} is {actual.dtype}"
        yield self.harness.check(f"{name} keeps {self.word}", float(not kept), 0.0, broken)
        error = root_mean_square(actual.to(self.harness.device).double() - expected) / root_mean_square(self._y)
        broken = f"{name} in {self.word} differs too much from float64; {_advice(self.dtype)}"
        yield self.harness.check(f"{name} in {self.word}", error, allowed or self._allowed, broken)


def _copy(harness: Harness, dtype: torch.dtype, device: torch.device) -> Layers:
    layers = Layers(harness.choice, harness.config, harness.hidden, harness.length)
    layers.load_state_dict(harness.layers.state_dict())
    return layers.to(dtype).to(device)


def _gradient_precision(harness: Harness, dtype: torch.dtype, word: str, device: torch.device) -> Check:
    true = gradients(harness.layers, harness.x, harness.weight)
    shifted = _shifted_gradients(harness, dtype)
    master = torch.float32 if dtype.itemsize < 4 else dtype
    with torch.autocast(device.type, dtype=dtype, enabled=master != dtype), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # a remark about speed
        x, weight = (tensor.to(master).to(device) for tensor in (harness.x, harness.weight))
        low = gradients(_copy(harness, master, device), x, weight)
    largest_size = max(root_mean_square(grad) for grad in true.values())
    rows, zero = [], set[str]()
    for name, grad in true.items():
        size = root_mean_square(grad)
        if size <= 1e-9 * largest_size:
            # Its terms cancel, as those of a shift that the softmax ignores. What float64 leaves of them, at two
            # points, is their size times its unit roundoff. The gradient is known to the precision of these terms.
            zero.add(name)
            left = max(size, root_mean_square(shifted[name]))
            size = max(largest_size, left / roundoff(torch.float64))
        error = root_mean_square(low[name].to(harness.device).double() - grad) / size
        allowed = harness.slack(dtype) * max(roundoff(dtype), root_mean_square(shifted[name] - grad) / size)
        rows.append((name, error, allowed))
    name, error, allowed = worst(rows)
    broken = f"the gradient of {harness.own_name(name)} in {word} differs too much from float64; {_advice(dtype)}"
    if name in zero:
        broken = (
            f"the gradient of {harness.own_name(name)} in {word} is more than the rounding of terms that cancel; it is "
            "zero in float64, as for a number that is added to all scores under a softmax; remove the parameter, or "
            "correct its backward pass in this precision"
        )
    return harness.check(f"gradients in {word}", error, allowed, broken)


def _shifted_gradients(harness: Harness, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the float64 gradients by name, [DRAWS, ...], where parameters and input are moved by a rounding."""
    moved, found = _copy(harness, torch.float64, harness.device), []
    for draw in map(str, range(DRAWS)):
        moved.load_state_dict(harness.moved_parameters(harness.layers, dtype, draw), strict=False)
        found.append(gradients(moved, harness.move(f"x{draw}", harness.x, dtype), harness.weight))
    return {name: torch.stack([grads[name] for grads in found]) for name in found[0]}


def _advice(dtype: torch.dtype) -> str:
    """Return the usual cause of an error in a precision."""
    if dtype.itemsize < 4:
        return "compute sums over time and exponentials in torch.promote_types(x.dtype, torch.float32)"
    return (
        "look for differences of large numbers, such as exp(a) * exp(-b) for exp(a - b), or of running sums, which "
        "need float64 up to there, and set the eps of norms"
    )


#: The graphs that are compiled, by how checks of them end.
GRAPHS = ("", " with segments")


def compilation(harness: Harness) -> Iterator[Check]:
    """Forward and backward trace into one graph each and compute the same, with packed segments too."""
    traced = torch.compile(harness.layers, backend="aot_eager_default_partitioner", fullgraph=True)
    broken = "compiled and eager disagree"
    for packed in GRAPHS:
        ids = harness.segments() if packed else None
        y, plain = _forward_and_backward(harness, harness.layers, ids)
        graphed_y, graphed = _forward_and_backward(harness, traced, ids)
        yield harness.same(f"compiled{packed}", graphed_y, y, broken)
        for name, grad in plain.items():
            error = largest(graphed[name], grad)
            yield harness.check(f"compiled gradient of {name}{packed}", error, harness.allowed, broken)
    torch.compiler.reset()


def _forward_and_backward(
    harness: Harness, run: Callable[..., Tensor], ids: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    outputs: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        outputs.append(run(x, ids))
        return outputs[0]

    grads = gradients(harness.layers, harness.x, harness.weight, run=keep)
    return outputs[0].detach(), grads
