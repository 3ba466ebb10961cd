"""The conformance suite beside float64: lower precision and compiled graphs must compute what float64 does."""

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from basecap.testing._bench import BATCH, Bench, Check, Layers, largest, root_mean_square, roundoff
from basecap.testing._proofs import decode, gradients, worst


class Lower:
    """The proofs that in `dtype` outputs, decoding, packing and gradients are the float64 ones to its precision."""

    def __init__(self, bench: Bench, dtype: torch.dtype):
        self.bench, self.dtype = bench, dtype
        self.word = str(dtype).removeprefix("torch.")
        self.layers, self.true = _copy(bench, dtype), _copy(bench, dtype).double()
        self.x = bench.x.to(dtype)

    def proofs(self) -> dict[str, Callable[[], Iterator[Check]]]:
        """Return the proofs by name."""
        proofs = {"outputs": self.outputs, "decoding": self.decoding, "gradients": self.gradients}
        return {f"{name} in {self.word}": prove for name, prove in proofs.items()}

    @torch.no_grad()
    def outputs(self) -> Iterator[Check]:
        """Forward, without and with segments."""
        ids = self.bench.segments()
        yield from self._compare("forward", self.layers(self.x), self._y)
        yield from self._compare("packed", self.layers(self.x, ids), self.true(self.x.double(), ids))

    @torch.no_grad()
    def decoding(self) -> Iterator[Check]:
        """A prompt followed by steps."""
        caches = self.layers.init_cache(BATCH, self.bench.length)
        yield from self._compare("decode", decode(self.layers, self.x, caches, self.bench.length // 2), self._y)

    def gradients(self) -> Iterator[Check]:
        """Those of training: in 16 bits with float32 parameters under autocast."""
        yield _gradient_precision(self.bench, self.dtype, self.word)

    @cached_property
    def _y(self) -> Tensor:
        return self.true(self.x.double())

    @cached_property
    def _allowed(self) -> float:
        moved = self.bench.moved(self.true, self.x.double(), self.dtype)
        effect = root_mean_square(moved - self._y) / root_mean_square(self._y)
        return self.bench.slack(self.dtype) * max(roundoff(self.dtype), effect)

    def _compare(self, name: str, actual: Tensor, expected: Tensor) -> Iterator[Check]:
        kept = actual.dtype == self.dtype
        broken = f"the output of {name} is {actual.dtype}"
        yield self.bench.check(f"{name} keeps {self.word}", float(not kept), 0.0, broken)
        error = root_mean_square(actual.double() - expected) / root_mean_square(self._y)
        broken = f"{name} in {self.word} is far from float64"
        yield self.bench.check(f"{name} in {self.word}", error, self._allowed, broken)


def _copy(bench: Bench, dtype: torch.dtype) -> Layers:
    layers = Layers(bench.choice, bench.config, bench.hidden, bench.length)
    layers.load_state_dict(bench.layers.state_dict())
    return layers.to(bench.device, dtype)


def _gradient_precision(bench: Bench, dtype: torch.dtype, word: str) -> Check:
    true = gradients(bench.layers, bench.x, bench.weight)
    moved = _copy(bench, torch.float64)
    moved.load_state_dict(bench.moved_parameters(bench.layers, dtype), strict=False)
    shifted = gradients(moved, bench.move("x", bench.x, dtype), bench.weight)
    master = torch.float32 if dtype.itemsize < 4 else dtype
    with torch.autocast(bench.device.type, dtype=dtype, enabled=master != dtype):
        low = gradients(_copy(bench, master), bench.x.to(master), bench.weight.to(master))
    largest_size = max(root_mean_square(grad) for grad in true.values())
    rows = []
    for name, grad in true.items():
        # A gradient that vanishes (a shift the softmax does not feel) is known only to the precision of the others.
        size = root_mean_square(grad)
        size = size if size > 1e-9 * largest_size else largest_size
        error = root_mean_square(low[name].double() - grad) / size
        allowed = bench.slack(dtype) * max(roundoff(dtype), root_mean_square(shifted[name] - grad) / size)
        rows.append((name, error, allowed))
    name, error, allowed = worst(rows)
    return bench.check(f"gradients in {word}", error, allowed, f"the gradient of {name} in {word} is far from float64")


def compilation(bench: Bench) -> Iterator[Check]:
    """Forward and backward trace into one graph each and compute the same, with packed segments too."""
    traced = torch.compile(bench.layers, backend="aot_eager", fullgraph=True)
    broken = "compiled and eager disagree"
    for packed, ids in (("", None), (" with segments", bench.segments())):
        y, plain = _forward_and_backward(bench, bench.layers, ids)
        graphed_y, graphed = _forward_and_backward(bench, traced, ids)
        yield bench.same(f"compiled{packed}", graphed_y, y, broken)
        for name, grad in plain.items():
            error = largest(graphed[name], grad)
            yield bench.check(f"compiled gradient of {name}{packed}", error, bench.allowed, broken)
    torch.compiler.reset()


def _forward_and_backward(
    bench: Bench, run: Callable[..., Tensor], ids: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    outputs: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        outputs.append(run(x, ids))
        return outputs[0]

    grads = gradients(bench.layers, bench.x, bench.weight, run=keep)
    return outputs[0].detach(), grads
