"""State and segments that do not fit are refused by every recurrence; decays may be as strong as they like."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import interpreted
from basecap.ops.delta_rule import delta_rule
from basecap.ops.delta_rule import reference as delta_reference
from basecap.ops.selective_scan import selective_scan
from basecap.ops.ssd import reference as ssd_reference
from basecap.ops.ssd import ssd
from basecap.ops.wkv6 import wkv6
from basecap.ops.wkv7 import wkv7, wkv7_bounded
from tests.ops._recurrences import draw

in_interpreter = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")

B, T, H, K, V = 2, 9, 3, 4, 5
decays = -draw(9, B, T, H, K).abs() * 0.1


def run_delta(**options: Tensor) -> object:
    return delta_rule(draw(0, B, T, H, K), draw(1, B, T, H, K), draw(2, B, T, H, V), draw(3, B, T, H), **options)


def run_ssd(**options: Tensor) -> object:
    return ssd(draw(0, B, T, 1, K), draw(1, B, T, 1, K), draw(2, B, T, H, V), decays[..., 0], **options)


def run_wkv6(**options: Tensor) -> object:
    return wkv6(draw(0, B, T, H, K), draw(1, B, T, H, K), draw(2, B, T, H, V), decays, draw(3, H, K), **options)


def run_wkv7(op: Callable[..., object] = wkv7, **options: Tensor) -> object:
    r, k, a, b = (draw(seed, B, T, H, K) for seed in range(4))
    return op(r, decays, k, draw(4, B, T, H, V), a, b, **options)


def run_wkv7_bounded(**options: Tensor) -> object:
    return run_wkv7(wkv7_bounded, **options)


OPS = [run_delta, run_ssd, run_wkv6, run_wkv7, run_wkv7_bounded]


@pytest.mark.parametrize("op", OPS)
def test_a_history_of_another_shape_is_refused(op: Callable[..., object]):
    op(state_BHKV=draw(5, B, H, K, V), segments=torch.zeros(B, T, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"state \(1, 3, 4, 5\) must be \(2, 3, 4, 5\)"):
        op(state_BHKV=draw(5, 1, H, K, V))
    with pytest.raises(ConfigError, match=r"segments \(2, 3\) must be \[B, T\] = \(2, 9\)"):
        op(segments=torch.zeros(B, 3, dtype=torch.int64))


def test_the_selective_scan_refuses_it_too():
    x, dt, A, Bs, Cs = (
        draw(0, B, T, K),
        draw(1, B, T, K).abs(),
        -draw(2, K, V).abs(),
        draw(3, B, T, V),
        draw(4, B, T, V),
    )
    with pytest.raises(ConfigError, match="state"):
        selective_scan(x, dt, A, Bs, Cs, state_BDN=draw(5, B, V, K))
    with pytest.raises(ConfigError, match="segments"):
        selective_scan(x, dt, A, Bs, Cs, segments=torch.zeros(1, T, dtype=torch.int64))


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
