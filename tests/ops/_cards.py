"""Compiles kernels as operators launch them on a GPU that is not there, and says what they need."""

import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from basecap.ops import _dispatch, known_bad


class Card(NamedTuple):
    """A GPU: what Triton compiles for, what PyTorch says of it, and bytes of shared memory that a program can have."""

    backend: str
    arch: int | str
    warp: int
    capability: tuple[int, int]
    processors: int
    multiprocessor: int
    program: int

    @property
    def amd(self) -> bool:
        return self.backend == "hip"


CARDS = {
    "A100": Card("cuda", 80, 32, (8, 0), 108, 164 * 1024, 163 * 1024),
    "RTX 4090": Card("cuda", 89, 32, (8, 9), 128, 100 * 1024, 99 * 1024),
    "H200": Card("cuda", 90, 32, (9, 0), 132, 228 * 1024, 227 * 1024),
    "B200": Card("cuda", 100, 32, (10, 0), 148, 228 * 1024, 227 * 1024),
    "RTX 5090": Card("cuda", 120, 32, (12, 0), 170, 100 * 1024, 99 * 1024),
    "MI300X": Card("hip", "gfx942", 64, (9, 4), 304, 64 * 1024, 64 * 1024),
}


class Compiled(NamedTuple):
    """A kernel, the bytes of shared memory of a program, None if it does not compile, and what is wrong, or ""."""

    kernel: str
    shared: int | None
    fault: str


def pretend(name: str, inspect: Callable[[Any, Any, dict], str] = lambda kernel, compiled, options: "") -> list:
    """Have launches compile for a card of `CARDS` and run nothing; return a list to which each adds a `Compiled`.

    Args:
        name: of the card.
        inspect: takes a kernel, what it was compiled to and its options, and returns what else is wrong, or "".
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction
    from triton.runtime.driver import driver

    card, found = CARDS[name], list[Compiled]()

    def compile_only(kernel: Any, *arguments: object, warmup: bool, **options: object) -> None:
        shared, fault = None, ""
        try:
            compiled = RUN(kernel, *arguments, warmup=True, **options)
            shared = compiled.metadata.shared
            if shared > card.program:
                fault = f"takes {shared} bytes of shared memory"
            else:
                fault = inspect(kernel, compiled, options)
        except Exception as error:
            fault = "does not compile: " + "".join(traceback.format_exception(error, limit=-1))
        found.append(Compiled(f"{kernel.__module__}.{kernel.__name__}", shared, fault))

    JITFunction.run = compile_only
    number = list(CARDS).index(name)  # Triton keeps one target for each device
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget(card.backend, card.arch, card.warp),
            get_current_device=lambda: number,
            get_current_stream=lambda device: 0,
        )
    )
    # The operators are to take these tensors, which lie on the CPU, for a GPU's.
    torch.Tensor.is_cuda = True
    torch.version.hip = "7.0" if card.amd else None
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: card.capability
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(
        shared_memory_per_multiprocessor=card.multiprocessor, multi_processor_count=card.processors, name=name
    )
    wrong = known_bad.known_bad({"triton": version("triton")}, card.capability[0])
    for module in [module for name, module in sys.modules.items() if name.startswith("basecap.ops.")]:
        if hasattr(module, "known_bad_on"):
            module.known_bad_on = lambda device: wrong
    _dispatch._unsupported = lambda device, dtype, shared: UNSUPPORTED(torch.device("cuda", 0), dtype, shared)
    _dispatch.forget()
    return found


def record_keys() -> dict[str, set[str]]:
    """After `pretend`, have launches do nothing; return by kernel what Triton would compile it by, for each launch."""
    from triton.runtime import JITFunction
    from triton.runtime.driver import driver

    found = defaultdict[str, set[str]](set)

    def bind_only(kernel: Any, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        *_, bind = kernel.device_caches[driver.active.get_current_device()]
        _, *key = bind(*arguments, **options, debug=False)
        found[f"{kernel.__module__}.{kernel.__name__}"].add(str(key))

    JITFunction.run = bind_only
    return found


def stop_at_llvm() -> None:
    """Have kernels of Triton, not those of Gluon, compile no further than LLVM's code, not optimised nor linked.

    There all is known that is written of them, as how much shared memory they take. The rest is most of the time.
    """
    from triton import knobs
    from triton._C.libtriton import llvm, passes
    from triton.backends.compiler import Language

    places = {"optimize_module": llvm, "link_extern_libs": llvm}
    places |= {"add_canonicalizer": passes.common, "add_cse": passes.common}

    def unoptimised(compile_stage: Callable) -> Callable:
        def run(source: object, metadata: dict) -> object:
            with ExitStack() as changes:
                for name, place in places.items():
                    changes.enter_context(patch.object(place, name, lambda *given: None))
                return compile_stage(source, metadata)

        return run

    def nothing(source: object, metadata: dict) -> bytes:
        metadata["name"] = ""
        return b""

    def cut(*stages_of_one: Any) -> tuple[str, str]:
        if stages_of_one:
            _, stages, _, language, _ = stages_of_one
            if language == Language.TRITON:
                stages["llir"] = unoptimised(stages["llir"])
                for later in list(stages)[list(stages).index("llir") + 1 :]:
                    stages[later] = nothing
        return "stops at LLVM", "stops at LLVM"  # part of the names of what Triton keeps

    knobs.runtime.add_stages_inspection_hook = cut


def _run() -> Any:
    from triton.runtime import JITFunction

    return JITFunction.run


#: What `pretend` replaces.
RUN, UNSUPPORTED = _run(), _dispatch._unsupported
