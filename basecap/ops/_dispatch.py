"""Choose the implementation of an op that runs, and record why no faster one does.

`FAMILIES` of an op lists its implementations ("families") by the name of their folder, the fastest first, plain PyTorch
last. A family has the same functions as the others of its op, in its `__init__` or, where these need Triton or Numba to
be imported, in its `launch`, and

    RUNS: str               its name in logs and in run.json, "Triton kernels"
    BACKEND: str | None     the `backend` that selects it; None: only "auto" does
    REPEATS: bool           left out, True: whether it gives the same bits twice, once PyTorch is deterministic
    supports(*given)        why it cannot run on these tensors, or None
    untried(*given)         may be left out: why "auto" does not take it though it can run, or None

The first family that supports the tensors runs; after `torch.use_deterministic_algorithms(True)`, that repeats itself.
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._guards import TracingContext

from basecap.errors import ConfigError, nearest
from basecap.ops._kinds import kinds_of

Backend = Literal["auto", "eager", "triton"]
#: Those of ops that also have kernels for CPUs.
WithNumba = Literal[Backend, "numba"]
Marked = TypeVar("Marked", bound=Callable[..., Any])
Decided = TypeVar("Decided")

logger = logging.getLogger("basecap.ops")

#: For each op, what has run since this dict was last cleared, and why nothing faster did.
IMPLEMENTATIONS: dict[str, str] = {}

#: The same of the passes with gradients that were compiled, for models that take their code over and trace nothing.
_compiled: dict[str, str] = {}

#: Backends that "auto" does not choose now, see `without_kernels`; None: families that no `backend` selects.
_left_out: list[tuple[WithNumba | None, ...]] = []

#: What `once` returned, by all that it depends on; beyond this many it forgets all.
_DECISIONS: dict[Any, Any] = {}
MOST_DECISIONS = 512

#: Separates the entries of an op that ran in several ways, for example in training and in decoding.
ALSO = " | "

#: The most programs along the second and third axis of a CUDA grid; the first axis takes 2^31 - 1.
MOST_PROGRAMS = 65_535

#: Names of the two families that most ops have.
TRITON, EAGER = "Triton kernels", "plain PyTorch"


def constant_result(function: Marked) -> Marked:
    """Return `function`, marked as `torch.compiler.assume_constant_result` does: it is called when code is traced.

    PyTorch's own decorator imports its compiler, which takes seconds even when nothing is compiled.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


@constant_result
def note(op: str, what: str) -> None:
    """Add to IMPLEMENTATIONS what `op` runs, and why nothing faster does; log it once.

    Compiled code does so when it is traced.
    """
    _add(IMPLEMENTATIONS, op, what)
    if torch.is_grad_enabled() and TracingContext.try_get() is not None:
        _add(_compiled, op, what)
    _log_once(op, what)


def _add(notes: dict[str, str], op: str, what: str) -> None:
    held = notes.get(op)
    if held is None:
        notes[op] = what
    elif held != what and what not in held.split(ALSO):
        notes[op] = held + ALSO + what


def note_compiled() -> None:
    """Note again what compiled code has noted: a model takes it over."""
    for op, noted in _compiled.items():
        for what in noted.split(ALSO):
            _add(IMPLEMENTATIONS, op, what)


def forget_compiled() -> None:
    """Forget what compiled code has noted, as that code is forgotten."""
    _compiled.clear()


@cache
def _log_once(op: str, what: str) -> None:
    logger.info("%s runs %s", op, what)


@contextmanager
def recorded() -> Iterator[dict[str, str]]:
    """Collect what ops run in this block, complete when the block ends; IMPLEMENTATIONS is unchanged."""
    held, found = dict(IMPLEMENTATIONS), dict[str, str]()
    IMPLEMENTATIONS.clear()
    try:
        yield found
    finally:
        found.update(IMPLEMENTATIONS)
        IMPLEMENTATIONS.clear()
        IMPLEMENTATIONS.update(held)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast on this device. The device "meta", which traces shapes, has no autocast."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def interpreted() -> bool:
    """Whether Triton runs its kernels in the interpreter, on the CPU (TRITON_INTERPRET=1)."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def unsupported_by_triton(x: Tensor, *, widest: int | None = None, shared: int = 0, programs: int = 0) -> str | None:
    """Return why Triton kernels cannot run on this tensor, or None.

    Args:
        x: one of the op's tensors.
        widest: largest supported last dimension of `x`; None: any.
        shared: bytes of shared memory a block of the kernels takes.
        programs: the most programs along the second or third axis of a kernel's grid.
    """
    reason = _unsupported(x.device, x.dtype, shared)
    if reason is not None:
        return reason
    if widest is not None and x.shape[-1] > widest:
        return f"the kernels take heads of at most {widest} channels, not {int(x.shape[-1])}"
    if programs > MOST_PROGRAMS:
        return f"a GPU launches at most {MOST_PROGRAMS:,} programs side by side, not {int(programs):,}"
    return None


@constant_result
def _unsupported(device: torch.device, dtype: torch.dtype, shared: int) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"there are no kernels for {dtype}"
    if interpreted():
        # The interpreter computes bfloat16 products wrongly, without an error.
        return None if dtype == torch.float32 else "Triton's interpreter is only right in float32"
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if device.index != torch.cuda.current_device():
        return f"{device} is not the current device; call torch.cuda.set_device({device.index})"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need compute capability 8.0 or newer"
    if torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor < shared:
        return f"the kernels need {shared // 1024} KB of shared memory"
    return None


def without_numba() -> AbstractContextManager[None]:
    """Run no kernels for the CPU in this block, which take seconds to compile, except where the caller forces them."""
    return _without("numba")


def without_kernels() -> AbstractContextManager[None]:
    """Run plain PyTorch alone in this block, except where the caller forces something else."""
    return _without("numba", "triton", None)


@contextmanager
def _without(*backends: WithNumba | None) -> Iterator[None]:
    _left_out.append(backends)
    try:
        yield
    finally:
        _left_out.pop()


@constant_result
def unsupported_by_numba(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why kernels for the CPU cannot run on such tensors, or None."""
    if device.type != "cpu":
        return f"the tensors are on {device.type}"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"there are no kernels for {dtype}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install 'basecap[cpu]')"
    return _import_error("numba")


@cache
def _import_error(package: str) -> str | None:
    """Return why an installed package cannot be imported, or None: Numba refuses a NumPy newer than itself."""
    try:
        importlib.import_module(package)
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        return f"{package} cannot be imported: {error}"
    return None


@constant_result
def deterministic() -> bool:
    """Whether the same bits are asked for twice, as `torch.use_deterministic_algorithms(True)` does."""
    return torch.are_deterministic_algorithms_enabled()


def _varies(family: ModuleType) -> str | None:
    """Return why a family cannot run where the same bits are asked for twice, or None."""
    if getattr(family, "REPEATS", True) or not deterministic():
        return None
    return "they have no deterministic form"


def check_backend(backend: WithNumba, backends: Sequence[str | None] = ("eager", "triton")) -> None:
    """Raise ConfigError unless `backend` is "auto" or one of the `backends` of an op."""
    if backend == "auto" or (backend is not None and backend in backends):
        return
    names = ["auto", *sorted({name for name in backends if name is not None})]
    raise ConfigError(f"unknown backend {backend!r}: {nearest(backend, names)}")


def choose(
    op: str, backend: WithNumba, families: Mapping[str, ModuleType], *given: Any, slower: str | None = None
) -> str:
    """Return the name of the family that `op` runs: the first that supports the arguments.

    What runs, and why nothing faster, is noted in IMPLEMENTATIONS, except for float64, which is used for comparisons,
    and for plain PyTorch chosen by the caller.

    Args:
        op: name of the op, for the log.
        backend: "auto" allows all families; any other value only those with this BACKEND.
        families: the families by name, the fastest first, plain PyTorch last.
        given: arguments of `supports`; the first is a tensor with the device and dtype of the op.
        slower: why "auto" does not take Triton kernels that could run.

    Raises:
        ConfigError: an unknown backend, or one that cannot run.
    """
    return taken(decide(op, backend, families, *given, slower=slower))


class Decision(NamedTuple):
    """Which of its `families` an op runs, and what is noted of that."""

    op: str
    name: str
    noted: str | None
    families: Mapping[str, ModuleType]


def decide(
    op: str, backend: WithNumba, families: Mapping[str, ModuleType], *given: Any, slower: str | None = None
) -> Decision:
    """Return what `choose` decides. A decision holds its families, so that their `id` remains theirs."""
    if torch.compiler.is_compiling():  # PyTorch 2.11 cannot trace id()
        return _decide(op, backend, families, given, slower)
    return once((op, backend, id(families), slower), given, lambda: _decide(op, backend, families, given, slower))


def taken(decision: Decision) -> str:
    """Note what runs, and return the name of the family."""
    if decision.noted is not None:
        note(decision.op, decision.noted)
    return decision.name


def once(asked: tuple[Any, ...], given: Sequence[Any], decide: Callable[[], Decided]) -> Decided:
    """Return decide(), or what it returned when the same was `asked` of arguments of these kinds.

    It may look at kinds of arguments (see `kinds_of`), at whether they require gradients, and at settings: the current
    device, deterministic algorithms, backends left out.
    """
    flat: list[Tensor] = []
    kinds = None if torch.compiler.is_compiling() else kinds_of(given, flat)
    if kinds is None:
        return decide()
    device = torch.cuda.current_device() if flat and flat[0].is_cuda else None
    learn = torch.is_grad_enabled() and tuple([x.requires_grad for x in flat])
    key = (asked, kinds, device, learn, deterministic(), *_left_out)
    found: Decided | None = _DECISIONS.get(key)
    if found is None:
        if len(_DECISIONS) >= MOST_DECISIONS:
            forget()
        found = _DECISIONS[key] = decide()
    return found


def forget() -> None:
    """Forget what was decided: for trials that change what decides."""
    _DECISIONS.clear()


def _decide(
    op: str, backend: WithNumba, families: Mapping[str, ModuleType], given: Sequence[Any], slower: str | None
) -> Decision:
    check_backend(backend, [family.BACKEND for family in families.values()])
    x: Tensor = given[0]
    refused: dict[str, str] = {}
    for name, family in families.items():
        if backend not in ("auto", family.BACKEND):
            continue
        if backend == "auto" and any(family.BACKEND in backends for backends in _left_out):
            continue
        # Triton's interpreter takes tensors of the CPU, but only if it is asked to.
        avoided = backend == "auto" and family.BACKEND == "triton"
        reason = (_off_the_gpu(x) if avoided else None) or family.supports(*given) or (slower if avoided else None)
        if avoided and reason is None and hasattr(family, "untried"):
            reason = family.untried(*given)
        reason = reason or _varies(family)
        if reason is None:
            silent = backend == "eager" or x.dtype == torch.float64
            why = _join_refusals(refused, last=family.BACKEND == "eager")
            what = family.RUNS if why is None else f"{family.RUNS}: {why}"
            return Decision(op, name, None if silent else what, families)
        refused[family.RUNS] = reason
    raise _refusal(op, *list(refused.items())[-1])


def families(*modules: ModuleType) -> dict[str, ModuleType]:
    """Return the families of an op by name, which is that of their folder (or of the file `eager`)."""
    return {module.__name__.rpartition(".")[2]: module for module in modules}


@cache
def functions_of(family: ModuleType) -> ModuleType:
    """Return the module with a family's functions: the `launch` of a folder. Plain PyTorch is a module of its own."""
    return launch_of(family.__name__) if hasattr(family, "__path__") else family


@cache
def launch_of(package: str | None) -> ModuleType:
    """Return the module `launch` of a package, given as its `__package__`.

    It imports Triton or Numba, which are only needed, and only installed, where their kernels can run.
    """
    return importlib.import_module(f"{package}.launch")


def _off_the_gpu(x: Tensor) -> str | None:
    return None if x.is_cuda else f"the tensors are on {x.device.type}"


def _join_refusals(refused: Mapping[str, str], last: bool) -> str | None:
    """Return why faster families do not run; `last`: the one that does is what remains where none can."""
    if not refused:
        return None
    reasons = list(dict.fromkeys(refused.values()))
    if last and len(reasons) == 1:
        return reasons[0]
    return "; ".join(f"no {runs} because {reason}" for runs, reason in refused.items())


def _refusal(op: str, runs: str, reason: str) -> ConfigError:
    return ConfigError(f"{op} cannot run its {runs}: {reason}; use backend='auto' or 'eager'.")
