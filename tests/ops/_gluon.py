"""Runs kernels in Gluon, which has no interpreter, with PyTorch: a thread for each warpgroup, real barriers.

It shows wrong numbers, barriers nobody arrives at, and data used before it is there or while it changes: at every
barrier chance decides which warpgroup goes on and which copy arrives; copies write noise until they have arrived; what
a product reads must stay the same from its beginning to the wait for it. One seed is one order of events. Layouts,
registers, caches, 32-bit overflow, the barriers within a warpgroup and fences are beyond it.
"""

import ast
import inspect
import itertools
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Int(int):
    """An integer that converts like a tensor."""

    def to(self, dtype: object) -> "Int":
        return self

    def __mod__(self, other: int) -> "Int":
        return Int(int(self) % other)

    def __floordiv__(self, other: int) -> "Int":
        return Int(int(self) // other)


class Pointer:
    """Places of one tensor's memory; any beyond it is an error."""

    def __init__(self, memory: Tensor, place: Any = 0):
        self.memory, self.place = memory, place
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.place + other)

    def __sub__(self, other: Any) -> "Pointer":
        return self + -other


def pointer(x: Tensor) -> Pointer:
    extent = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return Pointer(x.as_strided((extent,), (1,)))


def load(p: Pointer, mask: Any = None, other: float = 0) -> Any:
    if not isinstance(p.place, Tensor):
        assert 0 <= p.place < len(p.memory)
        return p.memory[p.place].item()
    mask = torch.ones(p.place.shape, dtype=torch.bool) if mask is None else mask.expand(p.place.shape)
    assert (p.place[mask] >= 0).all()
    out = torch.full(p.place.shape, other, dtype=p.memory.dtype)
    out[mask] = p.memory[p.place[mask].long()]
    return out


def store(p: Pointer, x: Tensor, mask: Tensor | None = None) -> None:
    mask = torch.ones(p.place.shape, dtype=torch.bool) if mask is None else mask.expand(p.place.shape)
    assert (p.place[mask] >= 0).all()
    p.memory[p.place[mask].long()] = x[mask]


def atomic_add(p: Pointer, x: Tensor, mask: Tensor, sem: str) -> None:
    mask = mask.expand(p.place.shape)
    assert (p.place[mask] >= 0).all()
    p.memory.index_add_(0, p.place[mask].long(), x[mask])


#: The one warpgroup there is before they part.
ALONE = -1


class Machine:
    """One program's warpgroups, of which one runs at a time, and the copies on their way."""

    def __init__(self) -> None:
        self.begin((0,), (1,), seed=0)

    def begin(self, program: tuple[int, ...], programs: tuple[int, ...], seed: int) -> None:
        """Forget all before and be this program of so many."""
        self.turn = threading.Condition()
        self.random = random.Random(seed)
        self.copies: list[Callable[[], None]] = []
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.running = ALONE
        self.failure: BaseException | None = None
        self.program, self.programs = program, programs
        self.own = threading.local()

    def wait(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Go on some time after `ready`."""
        number = getattr(self.own, "number", ALONE)
        self.waiting[number] = ready
        self.pass_on()
        while self.running != number and self.failure is None:
            self.turn.wait()
        if self.failure is not None:
            raise self.failure

    def pass_on(self) -> None:
        """Let copies arrive and a warpgroup go on, whichever chance decides."""
        while self.failure is None:
            able = [number for number, ready in self.waiting.items() if ready()]
            if not able and not self.copies:
                self.failure = RuntimeError("every warpgroup that is left waits at a barrier")
                break
            at = self.random.randrange(len(able) + len(self.copies))
            if at < len(able):
                self.running = able[at]
                del self.waiting[self.running]
                break
            self.copies.pop(at - len(able))()
        self.turn.notify_all()

    def specialise(self, parts: list[tuple[Callable, tuple]], *_: object) -> None:
        def body(number: int, function: Callable, arguments: tuple) -> None:
            self.own.number = number
            with self.turn:
                try:
                    while self.running != number and self.failure is None:
                        self.turn.wait()
                    if self.failure is None:
                        function(*arguments)
                except BaseException as error:
                    self.failure = self.failure or error
                if self.waiting:
                    self.pass_on()

        self.waiting = {number: lambda: True for number in range(len(parts))}
        self.pass_on()
        threads = [threading.Thread(target=body, args=(number, *part)) for number, part in enumerate(parts)]
        self.turn.release()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.turn.acquire()
        self.running = ALONE
        if self.failure is not None:
            raise self.failure
        while self.copies:
            self.copies.pop()()


MACHINE = Machine()


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived and all bytes expected have come."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.left = count

    def arrive(self, number: int = 1) -> None:
        assert self.left >= number > 0, "more arrive than the barrier counts"
        self.left -= number
        self.turn()
        MACHINE.wait()

    def expect(self, size: int) -> None:
        self.bytes += size
        self.arrive()

    def turn(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.count, self.phase + 1

    def wait(self, phase: int) -> None:
        assert phase in (0, 1)
        MACHINE.wait(lambda: self.phase % 2 != phase)


class Shared:
    """A tensor in shared memory, or barriers."""

    def __init__(self, data: Any):
        self.data = data

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: int) -> Any:
        assert 0 <= i < len(self.data)
        return self.data[i] if isinstance(self.data, list) else Shared(self.data[i])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.data.narrow(dim, start, length))

    def load(self, layout: object) -> Tensor:
        return self.data.clone()

    def store(self, x: Tensor) -> None:
        self.data.copy_(x)


def noise(x: Tensor) -> Tensor:
    return torch.full_like(x, float("nan") if x.is_floating_point() else -(2**30))


def allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Any:
    if layout == "barriers":
        return Barrier() if len(shape) == 1 else Shared([Barrier() for _ in range(shape[0])])
    return Shared(noise(torch.empty(shape, dtype=dtype)))


def own_list(name: str) -> list:
    """Return a list of the running warpgroup."""
    if not hasattr(MACHINE.own, name):
        setattr(MACHINE.own, name, [])
    return getattr(MACHINE.own, name)


def copy_to_shared(target: Shared, p: Pointer, mask: Tensor | None = None) -> None:
    target.store(noise(target.data))
    own_list("copies").append((target, p, mask))


def signal_copies(barrier: Barrier, increment_count: bool) -> None:
    """All threads of the warpgroup arrive once the copies each has begun are done."""
    assert not increment_count
    copies = list(own_list("copies"))
    own_list("copies").clear()

    def finish() -> None:
        for target, p, mask in copies:
            target.store(load(p, mask))
        barrier.left -= 128
        assert barrier.left >= 0
        barrier.turn()

    MACHINE.copies.append(finish)


class Descriptor:
    """A matrix as TMA copies blocks of it; what lies beyond is zero."""

    def __init__(self, x: Tensor, shape: list[int], strides: list[int], block: list[int], layout: object):
        self.matrix, self.block, self.layout = x.as_strided(shape, strides), block, layout
        self.dtype = x.dtype


def copy_block(d: Descriptor, place: list[int], barrier: Barrier, target: Shared) -> None:
    target.store(noise(target.data))

    def finish() -> None:
        x = torch.zeros(d.block, dtype=d.dtype)
        part = d.matrix[place[0] : place[0] + d.block[0], place[1] : place[1] + d.block[1]]
        x[: part.shape[0], : part.shape[1]] = part
        target.store(x)
        barrier.bytes -= x.numel() * x.element_size()
        barrier.turn()

    MACHINE.copies.append(finish)


def value_of(x: Any) -> Tensor:
    return x.data if isinstance(x, Shared) else x.value if isinstance(x, Product) else x


class Product:
    """A product begun, which has a value after the wait for it."""

    def __init__(self, a: Any, b: Any, to: Any):
        self.terms, self.value = (a, b, to), None
        self.begun = [value_of(x).clone() for x in (a, b)]

    def finish(self) -> None:
        a, b, to = (value_of(x) for x in self.terms)
        for x, begun in zip((a, b), self.begun, strict=True):
            assert ((x == begun) | (x != x) & (begun != begun)).all(), "what a product reads changes before its end"
        assert to is not None, "a product adds to one that has no value yet"
        self.value = to + a.float() @ b.float()


def begin_product(a: Any, b: Shared, to: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    product = Product(a, b, to if use_acc else torch.zeros_like(to))
    own_list("products").append(product)
    assert is_async
    return product


def wait_products(left: int, deps: list) -> Any:
    products = own_list("products")
    while len(products) > left:
        products.pop(0).finish()
    values = [value_of(x) for x in deps]
    assert all(x is not None for x in values)
    return values[0] if len(values) == 1 else values


def where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(condition, Tensor):
        return torch.where(condition, x, y)
    return x if condition else y


def layout(*_: object, **__: object) -> str:
    return "layout"


def language() -> SimpleNamespace:
    """Return what kernels know as `gl`."""
    return SimpleNamespace(
        constexpr=lambda x: x,
        float32=torch.float32,
        int32=torch.int32,
        int64=torch.int64,
        BlockedLayout=layout,
        SliceLayout=layout,
        DotOperandLayout=layout,
        NVMMADistributedLayout=layout,
        NVMMASharedLayout=layout,
        SwizzledSharedLayout=layout,
        allocate_shared_memory=allocate,
        warp_specialize=MACHINE.specialise,
        program_id=lambda axis: Int(MACHINE.program[axis]),
        num_programs=lambda axis: Int(MACHINE.programs[axis]),
        static_range=range,
        load=load,
        store=store,
        atomic_add=atomic_add,
        where=where,
        arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, x, dtype, layout: torch.full(shape, x, dtype=dtype),
        convert_layout=lambda x, layout: x,
        cast=lambda x, dtype: Int(x),
        minimum=min,
        cdiv=lambda x, y: -(-x // y),
        sum=lambda x, axis: x.sum(axis),
        max=lambda x, axis: x.amax(axis) if x.dim() > 1 else x.max().item(),
        min=lambda x, axis: x.amin(axis),
        exp2=torch.exp2,
        sqrt=lambda x: max(x, 0.0) ** 0.5,
        split=lambda x: x.unbind(-1),
        # The one kind of assembly there is.
        inline_asm_elementwise=lambda assembly, constraints, args, **_: torch.exp2(args[0] * args[1]),
    )


#: Triton's types that kernels are given.
TYPES = {"int32": torch.int32, "int64": torch.int64}


class Kernel:
    """A kernel that runs its programs one after the other; `seed` decides on the order of events."""

    def __init__(self, function: Callable):
        self.function, self.names = function, list(inspect.signature(function).parameters)
        self.seed = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def launch(*args: Any, **options: Any) -> None:
            values = dict(zip(self.names, args, strict=False)) | {k: v for k, v in options.items() if k in self.names}
            values = {name: pointer(x) if isinstance(x, Tensor) else TYPES.get(str(x), x) for name, x in values.items()}
            for program in itertools.product(*map(range, grid)):
                MACHINE.begin(program, grid, hash((self.seed, *program)))
                with MACHINE.turn:
                    self.function(**values)

        return launch


def simulated(path: Path) -> ModuleType:
    """Return the module of Gluon kernels at `path`, made to run on tensors of the CPU, with those beside it."""
    module = ModuleType(path.stem)
    source = path.read_text()
    # Layouts of values are not simulated.
    source = re.sub(r"@triton\.experimental\.gluon\.jit(\([^)]*\))?\n", "\n", source).replace(".type.layout", "")
    source = source.replace("@triton.experimental.gluon.constexpr_function", "")
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        names = [node.module] if isinstance(node, ast.ImportFrom) else [x.name for x in getattr(node, "names", ())]
        beside = path.with_name(f"{names[0].rpartition('.')[2]}.py") if names else path
        if isinstance(node, ast.ImportFrom) and f".{path.parent.name}." in names[0] and beside.is_file():
            others = vars(simulated(beside))
            found |= {x.name: others[x.name] for x in node.names}
        elif not any(name.startswith("triton.experimental") for name in names):
            continue
        lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    vars(module).update(
        found,
        gl=language(),
        mbarrier=SimpleNamespace(
            init=Barrier.init,
            wait=Barrier.wait,
            arrive=Barrier.arrive,
            expect=Barrier.expect,
            MBarrierLayout=lambda: "barriers",
        ),
        async_copy=SimpleNamespace(async_copy_global_to_shared=copy_to_shared, mbarrier_arrive=signal_copies),
        tma=SimpleNamespace(async_copy_global_to_shared=copy_block),
        warpgroup_mma=begin_product,
        warpgroup_mma_wait=wait_products,
        fence_async_shared=lambda: None,
        TensorDescriptor=Descriptor,
    )
    exec(compile("\n".join(lines), str(path), "exec"), vars(module))
    module.tl = SimpleNamespace(debug_barrier=lambda: None)
    for name, value in list(vars(module).items()):
        if name.endswith("_kernel"):
            setattr(module, name, Kernel(value))
    return module
