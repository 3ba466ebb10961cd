"""Every implementation of every op that can run on this machine, against the op's definition in float64.

The error of a kernel may be at most twice that of plain PyTorch in the same dtype, in the mean and in the worst
element. The error of plain PyTorch may be twice that of the definition evaluated in that dtype, in the mean only: in
single elements chunks are less exact than a loop over the tokens, because a decay across many tokens is the
exponential of a difference of two rounded sums.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import basecap.ops
from basecap.errors import ConfigError, describe_error, nearest
from basecap.ops import exact_device, recorded, unsupported_by_triton
from basecap.ops.cases import Case, Function
from basecap.testing.tolerance import assert_as_accurate, relative_error

#: Tokens, not a multiple of a chunk size.
T = 200
#: Default name of the last implementation of an op.
PLAIN = "plain PyTorch"
#: Compute capability of the GPUs that tiles were chosen on: H100 and H200.
TUNED = (9, 0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def checks() -> dict[str, ModuleType]:
    """Return the modules `check` of the ops by the names of their folders; see `basecap.ops.cases`."""
    folders = [module.name for module in pkgutil.iter_modules(basecap.ops.__path__) if module.ispkg]
    return {name: importlib.import_module(f"basecap.ops.{name}.check") for name in folders if not name.startswith("_")}


def discover() -> dict[str, Case]:
    """Return the cases of all ops by name.

    Raises:
        ConfigError: two ops have a case of one name.
    """
    found: dict[str, Case] = {}
    for folder, module in checks().items():
        for name, case in module.CASES.items():
            if name in found:
                raise ConfigError(f"basecap.ops.{folder}.check: another op has a case {name!r}; rename one.")
            found[name] = case
    return found


OPS = discover()


def check_op(name: str, device: torch.device) -> list[dict[str, Any]]:
    """Compare an op with its definition in float64, outputs and gradients; one row per tensor and dtype.

    Args:
        name: one of `OPS`.
        device: where to run; a device without float64 has the definition evaluated on the CPU.

    Returns:
        Rows by implementation, with the tensor's name, what ran (`path`, as in `IMPLEMENTATIONS`), its relative error,
        that of what it is compared with (`beside`), and the result, "passed" or what is wrong.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in OPS:
        raise ConfigError(f"unknown op {name!r}: {nearest(name, OPS)}")
    case = OPS[name]
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        inputs = _draw(case, device, dtype)
        tensors = list(inputs.values())
        truth = _results(case.definition, [x.to(exact_device(device)).double() for x in tensors])
        refused = None if case.kernels is None else _without_kernels(case, tensors[0])
        for function in _runnable(case, tensors[0]):
            try:
                with recorded() as ran:
                    found = _results(function, tensors)
            except ConfigError as error:
                if function is case.plain:
                    raise
                refused = refused or _reason(error)  # this GPU has too little memory for them, for example
                continue
            path = next(iter(ran.values()), None)  # the op itself; ops that it calls come after it
            judge: Callable[[str, Tensor, Tensor, Tensor], None]
            if function is case.plain:
                if case.kernels is not None:
                    path = PLAIN if refused is None else f"{PLAIN}: {refused}"
                judge = _assert_as_accurate_in_the_mean
                beside = _results(case.definition, [x.to(dtype) for x in tensors])  # it takes one dtype
            else:
                judge, beside = assert_as_accurate, _results(case.plain, tensors)
                if case.half:
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


def first_look(device: torch.device) -> list[dict[str, str]]:
    """Return what each op runs on a device in bfloat16, without gradients: rows with `op` and `path`.

    On a GPU it takes the time to compile the forward kernels of each op. Where these fail, the path is the error.
    """
    rows = []
    for name, case in OPS.items():
        tensors, path = list(_draw(case, device, torch.bfloat16).values()), PLAIN
        for function in _runnable(case, tensors[0]):
            try:
                with recorded() as ran, torch.no_grad():
                    function(*tensors)
            except ConfigError:
                continue
            except Exception as error:  # whatever a compiler or a driver raises
                path = f"kernels that fail ({describe_error(error)})"
            else:
                path = PLAIN if function is case.plain else next(iter(ran.values()), PLAIN)
            break
        rows.append({"op": name, "path": path})
    return rows


def unknown_card(
    device: torch.device, look: Callable[[torch.device], Sequence[Mapping[str, str]]] = first_look
) -> str | None:
    """Return what this GPU is and what ops run there, or None for one that kernels were tuned on.

    Args:
        device: where the ops are to be checked.
        look: `first_look`; it is called for a GPU that no kernel was tuned on.
    """
    if device.type != "cuda" or (torch.cuda.get_device_capability(device) == TUNED and not torch.version.hip):
        return None
    card, (major, minor) = torch.cuda.get_device_properties(device), torch.cuda.get_device_capability(device)
    by_path: dict[str, list[str]] = {}
    for row in look(device):
        runs = row["path"] if row["path"].startswith("kernels that fail") else row["path"].partition(":")[0]
        by_path.setdefault(runs, []).append(row["op"])
    ran = "; ".join(f"{path} ({', '.join(ops)})" for path, ops in by_path.items())
    size = f"{card.shared_memory_per_multiprocessor // 1024} KB of shared memory in a multiprocessor"
    known = f"no kernel was tuned on {card.name} (compute capability {major}.{minor}, {size})"
    return f"{known}; in bfloat16 its ops run {ran}" if ran else known


def _draw(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return an op's tensors of `T` tokens by name."""
    generator = torch.Generator().manual_seed(0)
    drawn = case.inputs(lambda *shape: torch.randn(shape, generator=generator), T)
    return {key: x.to(device, torch.float32 if key in case.wide else dtype) for key, x in drawn.items()}


def _reason(error: ConfigError) -> str:
    """Return why kernels were refused, without the op before it and the advice after it."""
    return str(error).partition(": ")[2].partition(";")[0] or str(error)


def _without_kernels(case: Case, x: Tensor) -> str | None:
    """Return why no kernels run on a tensor like `x`, or None."""
    if case.kernels is None:
        return "the op has no kernels of its own"
    if case.cuda and not x.is_cuda:
        return f"the tensors are on {x.device.type}"
    return unsupported_by_triton(x)


def _runnable(case: Case, x: Tensor) -> list[Function]:
    """Return what can run on a tensor like `x`: kernels first, plain PyTorch last."""
    found = []
    if case.kernels is not None and _without_kernels(case, x) is None:
        found.append(case.kernels)
    if case.numba is not None and case.families["numba_kernels"].supports(x) is None:
        found.append(case.numba)
    return [*found, case.plain]


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
