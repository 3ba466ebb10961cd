"""Every op refuses states, segments and devices that do not fit; decays may be as strong as they like."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from basecap.errors import ConfigError
from basecap.ops import check_devices, check_segments
from basecap.ops._dispatch import interpreted
from basecap.ops._shapes import check_floating, check_state
from basecap.ops.attention import attention, attention_step
from basecap.ops.channel_delta_rule import channel_delta_rule, decoupled_delta_rule
from basecap.ops.delta_rule import delta_rule
from basecap.ops.delta_rule import reference as delta_reference
from basecap.ops.forgetting_attention import forgetting_attention
from basecap.ops.long_convolution import long_convolution
from basecap.ops.selective_scan import selective_scan
from basecap.ops.short_convolution import short_convolution
from basecap.ops.ssd import reference as ssd_reference
from basecap.ops.ssd import ssd
from basecap.ops.ssd_mimo import Strengths, ssd_mimo
from basecap.ops.taylor_attention import taylor_attention, taylor_state
from basecap.ops.wkv4 import wkv4
from basecap.ops.wkv6 import wkv6
from basecap.ops.wkv7 import wkv7, wkv7_bounded
from tests.ops._recurrences import draw

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")

B, T, H, K, V, D = 2, 9, 3, 4, 5, 6
FEATURES = 1 + K + K * (K + 1) // 2


@dataclass(frozen=True)
class Case:
    """An op, its inputs by the names of its arguments, and the name and shape of its state."""

    op: Callable[..., object]
    inputs: dict[str, Tensor]
    state: str = ""
    shape: tuple[int, ...] = ()

    @property
    def segmented(self) -> bool:
        """Whether the op takes segments."""
        return "segments" in inspect.signature(self.op).parameters

    def history(self) -> dict[str, Tensor]:
        """Return a state and segments that fit, of those the op takes."""
        given = {self.state: draw(5, *self.shape)} if self.state else {}
        return given | ({"segments": torch.zeros(B, T, dtype=torch.int64)} if self.segmented else {})


q, k, a, b = (draw(seed, B, T, H, K) for seed in range(4))
v, beta = draw(4, B, T, H, V), draw(5, B, T, H).sigmoid()
decays, x = -draw(6, B, T, H, K).abs(), draw(7, B, T, D)
wkv7_inputs = {"r_BTHK": q, "log_decay_BTHK": decays, "k_BTHK": k, "v_BTHV": v, "a_BTHK": a, "b_BTHK": b}
per_head = "state_BHKV", (B, H, K, V)


def mimo(q_BTRGK, k_BTRGK, v_BTRHV, log_decay_BTH, now_BTH, kept_BTH, *, state_BHKV=None, segments=None):
    """Log decays and strengths of `ssd_mimo` are one argument."""
    strengths = Strengths(log_decay_BTH, now_BTH, kept_BTH)
    return ssd_mimo(q_BTRGK, k_BTRGK, v_BTRHV, strengths, state_BHKV=state_BHKV, segments=segments)


CASES = {
    "attention": Case(attention, {"q_BTHK": q, "k_BTGK": k, "v_BTGV": v, "slopes": draw(8, H).abs()}),
    "attention step": Case(attention_step, {"q_B1HK": q[:, :1], "k_BSGK": k, "v_BSGV": v, "bias_HS": draw(8, H, T)}),
    "delta rule by channel": Case(
        channel_delta_rule,
        {"q_BTHK": q, "k_BTHK": k, "v_BTHV": v, "beta_BTH": beta, "log_decay_BTHK": decays},
        *per_head,
    ),
    "delta rule, decoupled": Case(
        decoupled_delta_rule,
        {"q_BTHK": q, "k_BTHK": k, "v_BTHV": v, "erase_BTHK": a, "log_decay_BTHK": decays},
        *per_head,
    ),
    "delta rule": Case(
        delta_rule,
        {"q_BTHK": q, "k_BTHK": k, "v_BTHV": v, "beta_BTH": beta, "log_decay_BTH": decays[..., 0]},
        *per_head,
    ),
    "forgetting attention": Case(
        forgetting_attention, {"q_BTHK": q, "k_BTHK": k, "v_BTHV": v, "log_decay_BTH": decays[..., 0]}
    ),
    "long convolution": Case(long_convolution, {"u_BTD": x, "filter_LD": draw(8, T, D)}),
    "selective scan": Case(
        selective_scan,
        {
            "x_BTD": x,
            "dt_BTD": x.abs(),
            "A_DN": -draw(8, D, V).abs(),
            "B_BTN": draw(9, B, T, V),
            "C_BTN": draw(10, B, T, V),
        },
        "state_BDN",
        (B, D, V),
    ),
    "short convolution": Case(short_convolution, {"x_BTD": x, "weight_DW": draw(8, D, 3), "bias_D": draw(9, D)}),
    "ssd": Case(ssd, {"q_BTGK": q[:, :, :1], "k_BTGK": k[:, :, :1], "v_BTHV": v, "log_decay_BTH": -beta}, *per_head),
    "ssd mimo": Case(
        mimo,
        {
            "q_BTRGK": q[:, :, None],
            "k_BTRGK": k[:, :, None],
            "v_BTRHV": v[:, :, None],
            "log_decay_BTH": -beta,
            "now_BTH": beta,
            "kept_BTH": beta,
        },
        *per_head,
    ),
    "Taylor attention": Case(
        taylor_attention, {"q_BTHK": q, "k_BTHK": k, "v_BTHV": v}, "state_BHFX", (B, H, FEATURES, V + 1)
    ),
    "Taylor state": Case(taylor_state, {"k_BTHK": k, "v_BTHV": v}, "state_BHFX", (B, H, FEATURES, V + 1)),
    "wkv4": Case(
        wkv4,
        {"k_BTD": x, "v_BTD": x, "decay_D": draw(8, D).abs(), "bonus_D": draw(9, D)},
        "state_B2D",
        (B, 2, D),
    ),
    "wkv6": Case(
        wkv6,
        {"r_BTHK": q, "k_BTHK": k, "v_BTHV": v, "log_decay_BTHK": decays, "bonus_HK": draw(8, H, K)},
        *per_head,
    ),
    "wkv7": Case(wkv7, wkv7_inputs, *per_head),
    "wkv7 bounded": Case(wkv7_bounded, wkv7_inputs, *per_head),
}
WITH_HISTORY = {name: case for name, case in CASES.items() if case.history()}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.mark.parametrize("case", WITH_HISTORY.values(), ids=WITH_HISTORY)
def test_a_history_of_another_shape_is_refused(case: Case):
    case.op(**case.inputs, **case.history())
    wrong = []
    if case.state:
        for shape in ((1, *case.shape[1:]), (*case.shape[:-1], 1), case.shape[1:]):
            wrong.append((f"state {shape} must be {case.shape}", {case.state: torch.zeros(shape)}))
    if case.segmented:
        for shape in ((1, T), (B, T - 1), (B, T + 1), (T,)):
            history = {"segments": torch.zeros(shape, dtype=torch.int64)}
            wrong.append((f"segments {shape} must be [B, T] = (2, 9)", history))
    for message, history in wrong:
        with pytest.raises(ConfigError, match=re.escape(message)):
            case.op(**case.inputs, **history)


@every_case
def test_tensors_of_several_devices_are_refused_by_name(case: Case):
    given = case.inputs | case.history()
    first, *others = given
    for argument in others:
        name = argument if argument in ("segments", "slopes") else argument.rpartition("_")[0]
        with pytest.raises(ConfigError, match=f"^{name} is on meta but {first.partition('_')[0]} on cpu"):
            case.op(**given | {argument: given[argument].to("meta")})
    with pytest.raises(ConfigError, match=f" is on cpu but {first.partition('_')[0]} on meta"):
        case.op(**given | {first: given[first].to("meta")})


@every_case
def test_tensors_on_meta_give_the_shapes(case: Case):
    want, found = (
        tree_leaves(case.op(**{argument: x.to(device) for argument, x in case.inputs.items()}))
        for device in ("cpu", "meta")
    )
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in want]
    assert {x.device.type for x in found} == {"meta"}


def test_the_checks_break_no_compiled_graph():
    def checked(x: Tensor, state: Tensor | None, segments: Tensor) -> Tensor:
        check_floating({"x": x})
        check_state(state, (B, D))
        check_segments(segments, x.shape[:2])
        check_devices({"x": x, "state": state, "segments": segments})
        return x + 1

    torch.compiler.reset()
    compiled = torch.compile(checked, backend="eager", fullgraph=True)
    for state in (None, x[:, 0]):
        assert torch.equal(compiled(x, state, torch.zeros(B, T, dtype=torch.int64)), x + 1)


@pytest.mark.parametrize("name", ["selective scan", "short convolution"])
@pytest.mark.parametrize("broken", [x[0], x[:, :0]], ids=["two dimensions", "no token"])
def test_inputs_of_no_sequence_are_refused(name: str, broken: Tensor):
    case = CASES[name]
    with pytest.raises(ConfigError, match=r"must be \[B, T, D\] with at least one token"):
        case.op(**case.inputs | {"x_BTD": broken})


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=in_interpreter)])
@pytest.mark.parametrize("decay", [-1e9, -1e30, -torch.inf])
def test_what_follows_a_token_that_forgets_everything_keeps_its_digits(backend: str, decay: float):
    log_decay = -draw(6, 1, 24, 2).abs() * 0.1
    log_decay[:, 7] = -1e4  # leaves nothing, also in float64
    strong = log_decay.clone()
    strong[:, 7] = decay
    q, k, v, beta = draw(0, 1, 24, 2, 8), draw(1, 1, 24, 2, 8), draw(2, 1, 24, 2, 8), draw(3, 1, 24, 2).sigmoid()
    k = torch.nn.functional.normalize(k, dim=-1)
    q, k, v, beta, single = (x.float() for x in (q, k, v, beta, strong))
    for found, expected in (
        (
            delta_rule(q, k, v, beta, single, backend=backend),
            delta_reference.delta_rule(*(x.double() for x in (q, k, v, beta)), log_decay),
        ),
        (
            ssd(q[:, :, :1], k[:, :, :1], v, single, backend=backend),
            ssd_reference.ssd(*(x.double() for x in (q[:, :, :1], k[:, :, :1], v)), log_decay),
        ),
    ):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-4)
