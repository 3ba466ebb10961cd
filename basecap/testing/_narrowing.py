"""Find where a mixer narrows float64, the dtype of the conformance suite, to float32 with its seven digits."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from basecap.testing._harness import Check, Harness

_TORCH = str(Path(torch.__file__).parent)


class Watch(TorchDispatchMode):
    """Records the place of the first conversion of a float64 tensor to a narrower dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype: torch.dtype | None = None
        self.place = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: PyTorch would import its compiler, which takes seconds, to keep it out of this mode."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        converts = func is torch.ops.aten._to_copy.default or func._schema.is_mutable  # as in: narrow += wide
        if self.dtype is None and converts and isinstance(result, Tensor):
            narrow = result.is_floating_point() and result.dtype.itemsize < 8
            given = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.dim()]
            if narrow and any(x.dtype == torch.float64 for x in given):
                self.dtype, self.place = result.dtype, _place()
        return result


def _place() -> str:
    """Return file:line of the innermost frame outside this file and torch: the author's, or the op's they called."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and not frame.filename.startswith(_TORCH):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "unknown"


@torch.no_grad()
def float64(harness: Harness) -> Iterator[Check]:
    """Nothing is converted to a narrower dtype when input and parameters are float64."""
    watch, x = Watch(), harness.x.clone()
    prompt = min(16, harness.length // 2)
    with watch, suppress(Exception):  # the checks of packing and decoding report what raises
        harness.layers(x, harness.segments())
        caches = harness.layers.init_cache(harness.batch, harness.length)
        harness.layers.prefill(x[:, :prompt], caches)
        harness.layers.step(x[:, prompt : prompt + 1], caches)
    broken = (
        f"{watch.place} converts float64 to {watch.dtype}; basecap check runs in float64, and further checks would "
        "fail by rounding; use x.to(torch.promote_types(x.dtype, torch.float32)) instead of x.float()"
    )
    yield harness.check("computes in float64", float(watch.dtype is not None), 0.0, broken)
