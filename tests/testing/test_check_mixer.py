"""What the conformance suite says of a broken mixer: the fault itself, and nothing else because of it."""

import inspect
import re

import pytest
import torch
from torch import nn

from basecap.mixers import Cache
from basecap.testing.check_all import check_all
from basecap.testing.check_mixer import check_mixer
from tests.testing._running_mean import RunningMean, checked, failures


def line_of(function: object, marked: str = "def ") -> int:
    """Return the line in this file on which `function` holds `marked`."""
    lines, first = inspect.getsourcelines(function)
    return first + next(index for index, line in enumerate(lines) if marked in line)


def test_the_mixer_that_is_broken_below_is_sound(register):
    assert failures(check_mixer(register(RunningMean), length=32)) == {}


class HasNoStep(RunningMean):
    def step(self, x_B1D, cache):
        raise ArithmeticError  # step


def test_a_proof_that_raises_leaves_the_others_standing(register):
    report = check_mixer(register(HasNoStep), length=32, longest=0, dtypes=(torch.float32,))
    found = failures(report)
    line = line_of(HasNoStep.step, "# step")
    assert found == {
        "decoding": f"broken: decoding raised ArithmeticError (test_check_mixer.py:{line}, for x [2, 1, 64])."
    }
    assert {"derivatives", "forward in float32", "recipe"} <= {check.name for check in report.checks if check.passed}


def test_rows_of_what_raised_have_no_numbers(register):
    rows = []
    check_all([register(HasNoStep)], torch.device("cpu"), on_rows=rows.extend)
    (row,) = (row for row in rows if row["check"] == "decoding")
    assert (row["error"], row["allowed"]) == (None, None)
    assert row["result"].startswith("raised ArithmeticError (")


class Leaks(RunningMean):
    def forward(self, x_BTD, segments=None):
        return super().forward(x_BTD, segments) + 1e-3 * x_BTD.flip(1)


class LeaksAtOnePosition(RunningMean):
    """No position at which causality is tested lies between 6 and 7."""

    def forward(self, x_BTD, segments=None):
        ahead = (torch.arange(x_BTD.shape[1]) == 6)[:, None] * x_BTD.roll(-1, 1)
        return super().forward(x_BTD, segments) + 1e-3 * ahead


class LeaksInTraining(RunningMean):
    def forward(self, x_BTD, segments=None):
        return super().forward(x_BTD, segments) + (1e-3 * x_BTD.flip(1) if self.training else 0.0)


class LeaksBackwards(RunningMean):
    def forward(self, x_BTD, segments=None):
        later = 1e-3 * x_BTD.flip(1)
        return super().forward(x_BTD, segments) + (later - later.detach())


class Detaches(RunningMean):
    def forward(self, x_BTD, segments=None):
        return super().forward(x_BTD.detach(), segments)


class HasNoFiniteGradient(RunningMean):
    def forward(self, x_BTD, segments=None):
        return super().forward(x_BTD, segments) + (0 * x_BTD).sqrt()


class Counts(RunningMean):
    calls = 0

    def forward(self, x_BTD, segments=None):
        self.calls += 1
        return super().forward(x_BTD, segments) + self.calls


class Remembers(RunningMean):
    last = None

    def forward(self, x_BTD, segments=None):
        before, self.last = self.last, x_BTD.detach().mean()
        return super().forward(x_BTD if before is None else x_BTD + before, segments)


class DropsInTraining(RunningMean):
    def forward(self, x_BTD, segments=None):
        return nn.functional.dropout(super().forward(x_BTD, segments), 0.1, self.training)


@pytest.mark.parametrize(
    ("mixer", "name", "words"),
    [
        (Leaks, "causality before 1", r"sees the future: outputs before position 1 change .*, by .*e-.* allowed\."),
        (
            LeaksAtOnePosition,
            "causality before 7",
            "sees the future: outputs before position 7 .* first at position 6,",
        ),
        (LeaksInTraining, "causality before 1", "sees the future in training mode only: outputs before position 1 ch"),
        (LeaksBackwards, "causal gradients", "before position 10 have gradients with respect to inputs after it"),
        (Detaches, "output has a gradient", r"has no gradient in its input; do not use torch\.no_grad"),
        (HasNoFiniteGradient, "finite gradient", "its gradient is NaN or infinite in .* elements of the input; look"),
        (Counts, "repetition", "different outputs for the same input; remove what is random or kept from one call"),
        (Remembers, "repetition", "different outputs for the same input; remove what is random or kept from one call"),
        (DropsInTraining, "repetition", "different outputs .* in training mode only; .* dropout to 0 in the attribute"),
    ],
)
def test_one_mistake_in_forward_is_one_failure_with_its_place(mixer, name, words, register):
    found = failures(checked(register(mixer)))
    line = line_of(mixer.forward)
    assert list(found) == [name]
    assert re.search(rf"forward \(test_check_mixer.py:{line}\) .*{words}", found[name])


class CountsInWords(RunningMean):
    def state_bytes(self, length):
        return "many"


def test_a_cost_that_is_no_number_is_one_failure(register):
    found = failures(checked(register(CountsInWords)))
    assert list(found) == ["state bytes"]
    assert "returns 'many'; it must return a finite number of at least 0" in found["state bytes"]


class RaisesForward(RunningMean):
    def forward(self, x_BTD, segments=None):
        return x_BTD + "one"  # raises


def test_a_layer_that_raises_leaves_the_next_one_standing(register):
    report = checked(register(RaisesForward, CountsInWords))
    assert [check.name for check in report.failures] == ["forward", "state bytes"]
    assert (
        f"(test_check_mixer.py:{line_of(RaisesForward.forward, '# raises')}, for x [2, 32, 64])"
        in report.failures[0].message
    )


class DividesByZero(RunningMean):
    def forward(self, x_BTD, segments=None):
        y = super().forward(x_BTD, segments)
        return torch.cat([y[:, :5], y[:, 5:6] * float("nan"), y[:, 6:]], dim=1)


class Transforms(RunningMean):
    def forward(self, x_BTD, segments=None):
        return torch.fft.fft(super().forward(x_BTD, segments), dim=-1)


@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (DividesByZero, "NaN or infinity in 128 of 4096 elements, first at position 5 of row 0"),
        (Transforms, "real floating-point numbers like x, torch.float64, not torch.complex128"),
    ],
)
def test_numbers_that_are_none_end_the_checks(mixer, words, register):
    report = checked(register(mixer))
    assert [check.name for check in report.checks] == ["shape", "finite"]
    assert words in failures(report)["finite"]


class DiesWhenPacked(RunningMean):
    def forward(self, x_BTD, segments=None):
        return super().forward(x_BTD, segments) * (1.0 if segments is None else float("nan"))


def test_nan_in_one_proof_is_called_so(register):
    assert failures(checked(register(DiesWhenPacked)))["packed segments"].endswith("the compared values contain NaN.")


class SeesItsBlock(RunningMean):
    """From the second block of 256 on."""

    block = 256

    def forward(self, x_BTD, segments=None):
        y = super().forward(x_BTD, segments)
        blocks = [y[:, : self.block], *(x.mean(1, keepdim=True).expand_as(x) for x in self._later(x_BTD))]
        return torch.cat(blocks, dim=1)

    def _later(self, x_BTD):
        return x_BTD.split(self.block, dim=1)[1:]


class SeesItsLargeBlock(SeesItsBlock):
    block = 1024


@pytest.mark.parametrize("mixer", [SeesItsBlock, SeesItsLargeBlock])
def test_causality_is_proved_beyond_the_usual_blocks(mixer, register):
    report = check_mixer(register(mixer), dtypes=())
    names = {check.name for check in report.failures}
    assert "causality before 1066 of 1100" in names
    assert all("1100" in name for name in names)


class RemembersTheLast(RunningMean):
    """Decodes with the last 1,000 tokens alone."""

    def init_cache(self, batch, max_length):
        return Cache(tensors={"x": self.out.weight.new_zeros(batch, 0, self.layer.hidden)})

    def prefill(self, x_BTD, cache):
        cache.tensors["x"], cache.length = x_BTD, x_BTD.shape[1]
        return self.forward(x_BTD)

    def step(self, x_B1D, cache):
        cache.tensors["x"] = torch.cat([cache.tensors["x"], x_B1D], dim=1)[:, -1000:]
        cache.length += 1
        return self.out(cache.tensors["x"].mean(1, keepdim=True))


def test_decoding_is_proved_beyond_the_usual_windows(register):
    report = check_mixer(register(RemembersTheLast), dtypes=())
    assert "prefill 1016, then decode to 1032 of 1100" in failures(report)


class ForgetsLate(RunningMean):
    def step(self, x_B1D, cache):
        y = super().step(x_B1D, cache)
        return y if cache.length < 20 else 0 * y


def test_a_difference_is_said_with_its_place(register):
    message = failures(checked(register(ForgetsLate)))["decode"]
    line = line_of(ForgetsLate.step)
    assert f"the output of step (test_check_mixer.py:{line}) differs from that of forward (" in message
    assert "), first at position 19, by " in message


class DividesByDepth(RunningMean):
    """Leaks in all layers but the first."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.share = layer.index / (layer.depth - 1)

    def forward(self, x_BTD, segments=None):
        return super().forward(x_BTD, segments) + self.share * x_BTD.flip(1)


def test_a_later_layer_is_proved_too(register):
    found = failures(check_mixer(register(DividesByDepth), dtypes=()))
    assert list(found) == ["causality before 1066 of 1100"]
    assert "sees the future: with layer.index 1, outputs before position 1066" in found.popitem()[1]


class RaisesLate(RunningMean):
    def forward(self, x_BTD, segments=None):
        if x_BTD.shape[1] > 200:
            raise IndexError("200 positions are enough")
        return super().forward(x_BTD, segments)


def test_a_length_that_fails_is_one_failure(register):
    found = failures(check_mixer(register(RaisesLate), dtypes=(), longest=300))
    assert [name for name in found if "300" in name] == ["forward on 300 tokens"]
    assert "200 positions are enough" in found["forward on 300 tokens"]
    assert not any("300" in name for name in failures(check_mixer(register(RaisesLate), dtypes=(), longest=147)))


class ComputesInFloat32(RunningMean):
    def forward(self, x_BTD, segments=None):
        return super().forward(x_BTD.float().to(x_BTD.dtype), segments)  # narrow


class DecodesInFloat32(RunningMean):
    def init_cache(self, batch, max_length):
        return Cache(tensors={"sum": torch.zeros(batch, 1, self.layer.hidden)})

    def step(self, x_B1D, cache):
        cache.tensors["sum"] += x_B1D  # narrow
        cache.length += 1
        return self.out(cache.tensors["sum"].to(x_B1D) / cache.length)


@pytest.mark.parametrize(
    ("mixer", "function"), [(ComputesInFloat32, "forward"), (DecodesInFloat32, "step")], ids=["forward", "step"]
)
def test_the_line_that_leaves_float64_is_named(mixer, function, register):
    found = failures(checked(register(mixer)))
    line = line_of(getattr(mixer, function), "# narrow")
    assert f"test_check_mixer.py:{line} converts float64 to torch.float32" in found["computes in float64"]
    assert "torch.promote_types(x.dtype, torch.float32)" in found["computes in float64"]


class WritesIntoItsInput(RunningMean):
    def forward(self, x_BTD, segments=None):
        x_BTD += 0.1
        return super().forward(x_BTD, segments)


class StepWritesIntoItsInput(RunningMean):
    def step(self, x_B1D, cache):
        y = super().step(x_B1D, cache)
        x_B1D *= 2
        return y


def test_writing_into_the_input_is_called_that(register):
    report = checked(register(WritesIntoItsInput))
    assert [check.name for check in report.failures] == [report.checks[-1].name] == ["input untouched"]
    assert "modifies its input; write x = x + 0.1" in report.failures[0].message
    found = failures(checked(register(StepWritesIntoItsInput)))
    assert list(found) == ["input of decoding untouched"]
    line = line_of(StepWritesIntoItsInput.step)
    fault = f"step (test_check_mixer.py:{line}) modifies its input; work on a copy"
    assert found.popitem()[1] == f"broken: input of decoding untouched failed: {fault}."  # a yes or no has no size


class KeepsADict(RunningMean):
    def init_cache(self, batch, max_length):
        return super().init_cache(batch, max_length).tensors


class KeepsANumber(RunningMean):
    def init_cache(self, batch, max_length):
        return Cache(tensors={"sum": 0.0})


class StepsWithItsCache(RunningMean):
    def step(self, x_B1D, cache):
        return super().step(x_B1D, cache), cache


class StepsWithoutTime(RunningMean):
    def step(self, x_B1D, cache):
        return super().step(x_B1D, cache)[:, 0]


@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (KeepsADict, r"must return Cache\(tensors=\{name: tensor\}\), not dict\.$"),
        (KeepsANumber, r"must return Cache\(tensors=\{name: tensor\}\), not one whose 'sum' is float\.$"),
        (StepsWithItsCache, r"_mixer.py:\d+\) must return \[B, 1, D\] like its input, \[2, 1, 64\], not tuple\.$"),
        (StepsWithoutTime, r"_mixer.py:\d+\) must return \[B, 1, D\] like its input, \[2, 1, 64\], not \[2, 64\]\.$"),
    ],
)
def test_a_state_of_another_type_is_called_that(mixer, words, register):
    assert re.search(words, failures(checked(register(mixer)))["decoding"])


class NarrowTensor(RunningMean):
    def _means(self, x_BTD, segments):
        return torch.ones(x_BTD.shape[1], x_BTD.shape[1]).tril() @ x_BTD


class LayersInAList(RunningMean):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.more = [nn.Linear(layer.hidden, layer.hidden)]

    def forward(self, x_BTD, segments=None):
        return self.more[0](super().forward(x_BTD, segments))


@pytest.mark.parametrize("mixer", [NarrowTensor, LayersInAList])
def test_two_dtypes_in_one_product_come_with_advice(mixer, register):
    found = failures(checked(register(mixer)))["forward"]
    assert "create tensors with dtype=x.dtype, keep layers in an nn.ModuleList" in found


class DrawsABuffer(RunningMean):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.register_buffer("share", torch.rand(layer.hidden))

    def forward(self, x_BTD, segments=None):
        return super().forward(x_BTD, segments) * self.share

    def step(self, x_B1D, cache):
        return super().step(x_B1D, cache) * self.share


class DrawsATensor(DrawsABuffer):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        del self.share
        self.share = torch.rand(layer.hidden, dtype=torch.float64)


def test_what_is_drawn_in_init_is_found(register):
    found = failures(checked(register(DrawsABuffer)))
    assert list(found) == ["recipe"] and "differ in share; let recipe() draw" in found["recipe"]
    found = failures(checked(register(DrawsATensor)))
    assert "built again" in found and "a tensor that is no parameter" in found["built again"]


class RefusesALength(RunningMean):
    def forward(self, x_BTD, segments=None):
        if x_BTD.shape[1] == 10:
            raise ArithmeticError  # length
        return super().forward(x_BTD, segments)


def test_an_exception_comes_with_the_shape_of_the_input(register):
    found = failures(checked(register(RefusesALength)))
    line = line_of(RefusesALength.forward, "# length")
    words = f"causality raised ArithmeticError (test_check_mixer.py:{line}, for x [2, 10, 64])."
    assert found["causality"].endswith(words)
