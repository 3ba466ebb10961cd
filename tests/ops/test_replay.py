"""Records of launches, with a stand-in for Triton's launcher that works on addresses of the CPU."""

import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from basecap.ops import _replay
from basecap.ops._replay import Replayed, record, recorder
from tests.ops._launches import UTILITIES, Boxing, Elsewhere, Launcher, Nameless, dispatch


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record launches of `Launcher`, on the CPU."""
    monkeypatch.setattr(_replay, "DEVICES", ("cpu",))
    monkeypatch.setattr(recorder, "launcher_class", lambda: Launcher)
    monkeypatch.setattr(record, "current_stream", lambda: lambda device: 0)
    monkeypatch.setattr(recorder, "driver_utilities", lambda: UTILITIES)
    Launcher.dispatched = 0


def fourth(function: Callable[..., Any], *inputs: tuple[Any, ...]) -> Any:
    """Call the function with each of four inputs of one kind and return the last result, with no dispatcher in use."""
    wrapped = Replayed(function)
    for given in inputs[:3]:
        wrapped(*given)
    Launcher.dispatched = 0
    return wrapped(*inputs[3])


def four(*shape: int) -> list[tuple[Tensor]]:
    """Return four inputs."""
    return [(torch.randn(shape),) for _ in range(4)]


def two_launches(x: Tensor) -> Tensor:
    """x + 1 + 2 by way of a tensor that does not leave the function."""
    between, out = torch.empty_like(x), x.new_empty(x.shape)
    dispatch(between, x, x.numel(), 1.0)
    dispatch(out, between, x.numel(), 2.0)
    return out


def test_a_record_computes_from_new_arguments_without_the_dispatcher():
    inputs = four(3, 5)
    out = fourth(two_launches, *inputs)
    assert Launcher.dispatched == 0
    torch.testing.assert_close(out, inputs[3][0] + 3)


def test_results_of_two_replays_do_not_share_memory():
    inputs = four(4)
    wrapped = Replayed(two_launches)
    for given in inputs:
        wrapped(*given)
    first, second = wrapped(*inputs[0]), wrapped(*inputs[1])
    torch.testing.assert_close(first, inputs[0][0] + 3)
    torch.testing.assert_close(second, inputs[1][0] + 3)


def test_zeros_views_and_lists_of_results():
    def halves(x: Tensor) -> tuple[Tensor, list[Tensor], None]:
        both = x.new_zeros(2, x.numel())
        dispatch(both[1], x, x.numel() - 1, 1.0)
        return both, [both[1], x], None

    inputs = four(6)
    both, (half, same), none = fourth(halves, *inputs)
    assert Launcher.dispatched == 0 and none is None and same is inputs[3][0]
    torch.testing.assert_close(both[0], torch.zeros(6))
    torch.testing.assert_close(half[:5], inputs[3][0][:5] + 1)
    assert half[5] == 0 and half.data_ptr() == both[1].data_ptr()


def test_single_numbers_of_a_tensor():
    def numbers(x: Tensor) -> list[Tensor]:
        both = x.new_empty(2)
        dispatch(both, x, 2, 1.0)
        return [both[0], both[1] * 2]

    inputs = four(2)
    first, second = fourth(numbers, *inputs)
    assert Launcher.dispatched == 0
    torch.testing.assert_close(first, inputs[3][0][0] + 1)
    torch.testing.assert_close(second, inputs[3][0][1] * 2 + 2)


def test_autocast_has_records_of_its_own():
    wrapped = Replayed(lambda x: two_launches(x) @ x)
    x = torch.ones(2, 2)
    for dtype in (torch.bfloat16, torch.float32):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            assert {wrapped(x).dtype for _ in range(4)} == {dtype}


def test_operations_of_pytorch_are_part_of_a_record():
    def mixed(x: Tensor) -> Tensor:
        wide = x.new_full((x.numel(),), 2.0)
        wide.add_(x)
        out = torch.empty_like(x)
        dispatch(out, wide * 3, x.numel(), 1.0)
        return out.sum(0, keepdim=True)

    inputs = four(7)
    out = fourth(mixed, *inputs)
    assert Launcher.dispatched == 0
    torch.testing.assert_close(out, ((inputs[3][0] + 2) * 3 + 1).sum(0, keepdim=True))


def test_arguments_that_are_parts_of_one_tensor():
    def add(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(y)
        dispatch(out, y, y.numel(), 1.0)
        return out + x

    whole = [torch.randn(2, 5) for _ in range(4)]
    out = fourth(add, *((x[0], x[1]) for x in whole))
    assert Launcher.dispatched == 0
    torch.testing.assert_close(out, whole[3].sum(0) + 1)


def test_forgotten_records_hold_no_constant_of_a_module(monkeypatch: pytest.MonkeyPatch):
    def add(x: Tensor) -> Tensor:
        return two_launches(x) + Launcher.number

    monkeypatch.setattr(Launcher, "number", 1, raising=False)
    wrapped, x = Replayed(add), torch.ones(3)
    for _ in range(3):
        wrapped(x)
    Launcher.number = 2
    torch.testing.assert_close(wrapped(x), x + 4)  # as it was
    _replay.forget()
    for _ in range(3):
        torch.testing.assert_close(wrapped(x), x + 5)


def test_an_argument_that_is_given_twice_is_one():
    def add(x: Tensor, given: list[Tensor]) -> Tensor:
        out = torch.empty_like(x)
        dispatch(out, given[0], x.numel(), 1.0)
        return out + x + given[1]

    inputs = [(x, [torch.randn(5), x]) for (x,) in four(5)]
    x, (y, _) = inputs[3]
    wrapped = Replayed(add)
    for given in (*inputs[:3], inputs[3]):
        Launcher.dispatched = 0
        torch.testing.assert_close(wrapped(*given), add(*given))
    assert Launcher.dispatched == 1  # the one that says what is right
    torch.testing.assert_close(wrapped(x, [x, y]), add(x, [x, y]))  # another one of three is given twice
    assert len(wrapped.records) == 2


@pytest.mark.parametrize("end", [6, 4])
def test_a_part_of_an_argument_that_begins_where_another_does(end: int):
    """As long as that or not: whose part it is, no record can know."""

    def part(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty(2)
        dispatch(out, x[2:], 2, 1.0)
        return out

    wrapped, whole = Replayed(part), torch.arange(12.0)
    for _ in range(3):
        wrapped(whole[:4], whole[2:end])
    torch.testing.assert_close(wrapped(whole[:4], whole[6 : 4 + end]), whole[2:4] + 1)


def test_parts_of_arguments_that_lie_between_one_another():
    """As queries and keys of one projection do."""

    def parts(x: Tensor, y: Tensor) -> Tensor:
        out = x.new_empty(2, 2)
        dispatch(out[0], x[1], 2, 1.0)
        dispatch(out[1], y[0, 1:], 1, 2.0)
        return out[:, :1] + x[1:, :1]

    inputs = [torch.randn(2, 4) for _ in range(4)]
    out = fourth(parts, *((both[:, :2], both[:, 2:]) for both in inputs))
    both = inputs[3]
    assert Launcher.dispatched == 0
    torch.testing.assert_close(out[:, 0], torch.stack([both[1, 0] + 1, both[0, 3] + 2]) + both[1, 0])
    apart = Replayed(parts)
    for both in inputs:
        found = apart(both[:, :2], both[:, 2:])
    torch.testing.assert_close(found, out)
    torch.testing.assert_close(apart(both[:, :2], both[:, 2:].clone()), out)


def test_an_address_inside_a_descriptor():
    def through(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dispatch(out, SimpleNamespace(base=x, shape=[x.numel()]), x.numel(), 1.0)
        return out

    inputs = four(5)
    out = fourth(through, *inputs)
    assert Launcher.dispatched == 0
    torch.testing.assert_close(out, inputs[3][0] + 1)


def test_a_result_without_elements():
    def with_nothing(x: Tensor) -> tuple[Tensor, Tensor]:
        nothing = x.new_empty(0)
        out = torch.empty_like(x)
        dispatch(out, x, x.numel(), 1.0)
        return out, nothing

    inputs = four(5)
    out, nothing = fourth(with_nothing, *inputs)
    assert Launcher.dispatched == 0 and nothing.shape == (0,)
    torch.testing.assert_close(out, inputs[3][0] + 1)


def test_other_shapes_strides_and_numbers_have_records_of_their_own():
    wrapped = Replayed(lambda x, number: two_launches(x) + number)
    for _ in range(3):
        wrapped(torch.ones(4), 1)
    Launcher.dispatched = 0
    for x, number in ((torch.ones(5), 1), (torch.ones(4), 2), (torch.ones(8)[::2].clone(), 1)):
        torch.testing.assert_close(wrapped(x, number), x + 3 + number)
    assert Launcher.dispatched == 4  # the last one is of the recorded kind


@pytest.mark.parametrize("name", ["reads a value", "another view of the same", "other dtype", "boxed"])
def test_calls_that_no_record_can_hold_stay_ordinary(name: str):
    def reads(x: Tensor, y: Tensor) -> Tensor:
        return two_launches(x) + x.sum().item()

    def bits(x: Tensor, y: Tensor) -> Tensor:
        return two_launches(x.view(torch.int32).view(torch.float32))

    def boxed(x: Tensor, y: Tensor) -> Any:
        return SimpleNamespace(held=two_launches(x))

    whole = torch.arange(8.0)
    x, y = whole[:4], whole[4:]
    function = {"reads a value": reads, "other dtype": bits, "boxed": boxed}.get(name)
    if function is None:
        function, y = (lambda x, y: two_launches(x) + y.sum()), x[:2]
    wrapped = Replayed(function)
    expected = function(x, y)
    for added in range(4):
        Launcher.dispatched = 0
        found = wrapped(x + added, y) if name == "boxed" else wrapped(x, y)
        torch.testing.assert_close(*((found.held, expected.held + added) if name == "boxed" else (found, expected)))
    assert Launcher.dispatched or name == "other dtype"


@pytest.mark.parametrize("kind", [Elsewhere, Nameless, Boxing])
def test_launches_that_are_not_seen_or_hide_addresses_stay_ordinary(kind: type[Launcher], monkeypatch):
    monkeypatch.setattr(recorder, "launcher_class", lambda: kind)
    launcher = kind()

    def add(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dispatch(out, x, x.numel(), 1.0, launcher=launcher)
        return out

    inputs = four(5)
    torch.testing.assert_close(fourth(add, *inputs), inputs[3][0] + 1)
    assert Launcher.dispatched == 1


def test_copies_that_an_operation_makes_where_it_must_are_part_of_a_record():
    """Below autograd, where kernels are launched, operations such as `contiguous` are not shown in parts."""

    def copying(x: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            wide, turned = x.float(), x.T.float().contiguous().clamp_(min=0)
            out = torch.empty_like(turned)
            dispatch(out, turned, x.numel(), 1.0)
            return out + wide.T.reshape(-1, 2).contiguous()

    inputs = [(x.half(),) for (x,) in four(2, 3)]
    x = inputs[3][0].float().T
    out = fourth(copying, *inputs)
    assert Launcher.dispatched == 0
    torch.testing.assert_close(out, x.clamp(min=0) + 1 + x)


def test_a_part_without_elements():
    def nothing_before(x: Tensor) -> Tensor:
        sums = x.new_empty(2)
        dispatch(sums, x, 2, 1.0)
        return torch.cat([sums[:1], sums[:0].cumsum(0), x[2:2] * 2])

    inputs = four(2)
    out = fourth(nothing_before, *inputs)
    assert Launcher.dispatched == 0
    torch.testing.assert_close(out, inputs[3][0][:1] + 1)


def test_a_profiler_sees_every_launch_and_a_record_calls_none(monkeypatch: pytest.MonkeyPatch):
    hooks, seen, wrapped = recorder.launch_hooks(), [], Replayed(two_launches)
    x = torch.ones(3)
    for _ in range(3):
        wrapped(x)
    (kind,) = wrapped.records.values()
    assert not any(constant is hooks[0] for constant in kind.replay.__globals__.values())
    hooks[0].add(seen.append)
    try:
        wrapped(x)
    finally:
        hooks[0].remove(seen.append)
    assert seen == [{"name": "add"}] * 2
    wrapped(x)
    assert len(seen) == 2


def test_numbers_that_are_equal_but_not_the_same_have_records_of_their_own():
    def signed(x: Tensor, number: float) -> tuple[Tensor, str]:
        return two_launches(x), repr(number)

    wrapped, x = Replayed(signed), torch.ones(2)
    for number in (1, 1.0, True, 0.0, -0.0, 0, False):
        assert {wrapped(x, number)[1] for _ in range(4)} == {repr(number)}
    for _ in range(5):
        wrapped(x, float("nan"))
    assert len(wrapped.records) == 8


def test_a_call_that_fails_while_it_is_recorded_leaves_no_trace():
    fail = False

    def fragile(x: Tensor) -> Tensor:
        out = two_launches(x)
        if fail:
            raise RuntimeError("out of memory")
        return out

    wrapped = Replayed(fragile)
    x = torch.ones(3)
    wrapped(x)
    fail = True
    with pytest.raises(RuntimeError, match="out of memory"):
        wrapped(x)
    fail = False
    for _ in range(3):
        torch.testing.assert_close(wrapped(x), x + 3)
    assert Launcher.__call__.__qualname__ == "Launcher.__call__"


def test_threads_record_and_replay_side_by_side():
    wrapped, wrong = Replayed(two_launches), []
    interval = sys.getswitchinterval()

    def work(number: int) -> None:
        for call in range(60):
            x = torch.full((1 + (number + call) % 7,), float(call))
            if not torch.equal(wrapped(x), x + 3):
                wrong.append((number, call))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong and all(kind.replay is not None for kind in wrapped.records.values())


def test_records_are_few_and_hold_no_tensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_replay, "MOST_RECORDS", 2)
    wrapped, held = Replayed(two_launches), []
    for size in (1, 2, 3, 1):
        for _ in range(3):
            x = torch.ones(size)
            held += [weakref.ref(x), weakref.ref(wrapped(x))]
    del x
    assert len(wrapped.records) == 2 and not any(reference() for reference in held)


def test_a_mode_sees_an_ordinary_call():
    from torch.utils.flop_counter import FlopCounterMode

    wrapped = Replayed(lambda x: two_launches(x) @ x)
    x = torch.ones(2, 2)
    for _ in range(3):
        wrapped(x)
    with FlopCounterMode(display=False) as counter:
        wrapped(x)
    assert counter.get_total_flops() == 16


def test_scratch_memory_is_used_again_and_named_tensors_are_released():
    def chain(x: Tensor) -> Tensor:
        for _ in range(6):
            between = torch.empty_like(x)
            dispatch(between, x, x.numel(), 1.0)
            x = between
        out = torch.empty_like(x)
        dispatch(out, x, x.numel(), 1.0)
        return out

    wrapped = Replayed(chain)
    inputs = four(1000)
    for given in inputs[:2]:
        wrapped(*given)
    (kind,) = wrapped.records.values()
    sizes = [x.args[0] for x in kind.replay.__globals__.values() if getattr(x, "args", ())]
    assert (4096 + 4000,) in sizes  # two of the six at a time
    torch.testing.assert_close(wrapped(*inputs[3]), inputs[3][0] + 7)


def test_a_function_that_launches_nothing_is_not_recorded(monkeypatch: pytest.MonkeyPatch):
    """A recording would keep all that plain PyTorch makes in between."""
    monkeypatch.setattr(_replay, "record_call", None)
    wrapped = Replayed(lambda x: (x * 2).relu() + 1)
    for x in (torch.randn(3) for _ in range(3)):
        torch.testing.assert_close(wrapped(x), (x * 2).relu() + 1)
    assert [kind.recorded for kind in wrapped.records.values()] == [False]


@pytest.mark.parametrize("number", [0, 0.0, -0.0, -1, 2.5, float("inf")])
def test_memory_that_is_filled(number: float):
    def filled(x: Tensor) -> list[Tensor]:
        made = [torch.full((2, 3), number), x.new_full((2,), number), torch.full_like(x, number), x.new_zeros(2)]
        dispatch(torch.empty_like(x), x, x.numel(), 1.0)
        return made

    found = fourth(filled, *four(4))
    assert Launcher.dispatched == 0
    expected = [torch.full((2, 3), number), torch.full((2,), float(number)), torch.full((4,), float(number))]
    for x, y in zip(found, [*expected, torch.zeros(2)], strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y) and torch.equal(x.signbit(), y.signbit())


def test_a_result_is_made_with_the_shape_that_it_leaves_with():
    def turned(x: Tensor) -> tuple[Tensor, Tensor]:
        out, half = x.new_empty(6), x.new_empty(2, 4)
        dispatch(out, x, 6, 1.0)
        dispatch(half, x, 8, 2.0)
        return out.view(2, 3), half[0]

    inputs = four(8)
    out, half = fourth(turned, *inputs)
    assert Launcher.dispatched == 0 and out._base is None
    torch.testing.assert_close(out, inputs[3][0][:6].view(2, 3) + 1)
    torch.testing.assert_close(half, inputs[3][0][:4] + 2)
