"""The state space of several inputs and outputs (Mamba-3, arXiv 2603.15569); see README.md."""

from collections.abc import Mapping

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Backend, check_backend, choose, families, without_autocast
from basecap.ops._shapes import check_devices, check_floating, check_segments, check_state, finite_log_decay
from basecap.ops.ssd import triton_kernels as ssd_kernels
from basecap.ops.ssd_mimo import eager, triton_chunks, triton_positions
from basecap.ops.ssd_mimo.eager import of_heads as of_heads
from basecap.ops.ssd_mimo.inputs import Heads as Heads
from basecap.ops.ssd_mimo.inputs import Strengths as Strengths

#: The fastest first.
FAMILIES = families(triton_chunks, triton_positions, eager)


def ssd_mimo(
    q_BTRGK: Tensor,
    k_BTRGK: Tensor,
    v_BTRHV: Tensor,
    strengths: Strengths,
    *,
    heads: Heads | None = None,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Run S_t = a_t S_{t-1} + kept_t sum_r k_tr v_tr^T, o_tr = (a_t S_{t-1} + now_t sum_s k_ts v_ts^T)^T q_tr.

    A token writes and reads R times, and reads itself with a strength of its own.

    The kernels support first-order derivatives by torch.autograd; torch.func (grad, vjp, jvp), forward mode and second
    derivatives raise an error. Plain PyTorch supports all of them.

    Args:
        q_BTRGK: queries, for each group of H / G heads; they may be wider than v, in whose dtype products are taken.
        k_BTRGK: keys, likewise.
        v_BTRHV: values.
        strengths: log decays and strengths.
        heads: biases and rotations of queries and keys; None: all heads of a group have the same ones.
        state_BHKV: state before the first token; zero when None.
        segments: int64 [B, T], see `Mixer.forward`; the state given continues into the first segment.
        backend: "auto"; "eager" (plain PyTorch) and "triton" force one.

    Returns:
        o [B, T, R, H, V] in the dtype of v and the final state [B, H, K, V] in float32 (float64 for float64).

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or an unavailable backend.
    """
    given = {  # without _asdict, which PyTorch 2.8 cannot trace
        "q": q_BTRGK,
        "k": k_BTRGK,
        "v": v_BTRHV,
        **dict(zip(Strengths._fields, strengths, strict=True)),
        **({} if heads is None else dict(zip(Heads._fields, heads, strict=True))),
    }
    _validate(given)
    (B, T, _, H, V), K, dtype = v_BTRHV.shape, q_BTRGK.shape[4], v_BTRHV.dtype
    check_state(state_BHKV, (B, H, K, V))
    check_segments(segments, (B, T))
    check_devices({**given, "state": state_BHKV, "segments": segments})
    wide = torch.promote_types(dtype, torch.float32)
    q, k = (x if x.dtype == wide else x.to(dtype) for x in (q_BTRGK, k_BTRGK))
    strengths = Strengths(finite_log_decay(strengths.log_decay), strengths.now.to(wide), strengths.kept.to(wide))
    with without_autocast(v_BTRHV.device):
        if T == 1 and state_BHKV is not None and backend != "triton":
            check_backend(backend)
            return eager.step(q, k, v_BTRHV, strengths, heads, state_BHKV)
        run = FAMILIES[choose("ssd_mimo", backend, FAMILIES, v_BTRHV, q, slower=ssd_kernels.slower(v_BTRHV))]
        out: tuple[Tensor, Tensor] = run.ssd_mimo(q, k, v_BTRHV, strengths, heads, state_BHKV, segments)
    return out


def _validate(given: Mapping[str, Tensor]) -> None:
    check_floating(given)
    q, k, v = given["q"], given["k"], given["v"]
    if q.dim() != 5 or q.shape != k.shape or q.shape[3] < 1:
        shapes = f"q {tuple(q.shape)} and k {tuple(k.shape)}"
        raise ConfigError(f"{shapes} must both be [B, T, R, G, K] with G at least 1.")
    (B, T, R, G, K), of_v = q.shape, tuple(v.shape)
    if v.dim() != 5 or v.shape[:3] != q.shape[:3] or v.shape[3] < 1 or v.shape[3] % G:
        sizes = f"B, T, R = {(B, T, R)} and H a positive multiple of {G} groups"
        raise ConfigError(f"v {of_v} must be [B, T, R, H, V] with {sizes}.")
    if T < 1 or R < 1:
        raise ConfigError(f"v {of_v} must have at least one token, and one write of it.")
    H = v.shape[3]
    per_head = dict.fromkeys(Strengths._fields, ("[B, T, H]", (B, T, H)))
    for name, (letters, shape) in (per_head | dict.fromkeys(("q_bias", "k_bias"), ("[H, R, K]", (H, R, K)))).items():
        if name in given and given[name].shape != shape:
            raise ConfigError(f"{name} {tuple(given[name].shape)} must be {letters} = {shape}.")
    angles = given.get("angles")
    if angles is not None and (angles.dim() != 4 or angles.shape[:3] != (B, T, H) or 2 * angles.shape[3] > K):
        sizes = f"B, T, H = {(B, T, H)} and A at most {K // 2}"
        raise ConfigError(f"angles {tuple(angles.shape)} must be [B, T, H, A] with {sizes}.")
