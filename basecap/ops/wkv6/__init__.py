"""The recurrence of RWKV-5 (constant decay per channel) and RWKV-6 (data-dependent decay), arXiv 2404.05892."""

from torch import Tensor

from basecap.errors import ConfigError
from basecap.ops._dispatch import Backend, choose, families, without_autocast
from basecap.ops._influence import Influence, wide
from basecap.ops._shapes import check_devices, check_floating, check_segments, check_state
from basecap.ops.wkv6 import eager, triton_chunks, triton_tokens

#: The fastest first.
FAMILIES = families(triton_chunks, triton_tokens, eager)


def wkv6(
    r_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    bonus_HK: Tensor,
    *,
    state_BHKV: Tensor | None = None,
    segments: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Run o_t = r_t^T (S_{t-1} + diag(bonus) k_t v_t^T), S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T.

    The kernels support first-order derivatives by torch.autograd; torch.func (grad, vjp, jvp), forward mode and second
    derivatives raise an error. Plain PyTorch supports all of them.

    Args:
        r_BTHK: receptances, what is read with.
        k_BTHK: keys.
        v_BTHV: values.
        log_decay_BTHK: logarithm of the decays, at most 0; B and T may be 1 (RWKV-5: [1, 1, H, K]).
        bonus_HK: weight of the present token, which has not been written yet when it is read.
        state_BHKV: state before the first token; zero when None.
        segments: int64 [B, T], see `Mixer.forward`; the state given continues into the first segment.
        backend: "auto"; "eager" (plain PyTorch) and "triton" force one.

    Returns:
        o [B, T, H, V] in the dtype of v and the final state [B, H, K, V] in float32 (float64 for float64).

    Raises:
        ConfigError: shapes, dtypes or devices that do not match, or an unavailable backend.
    """
    _validate(r_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, bonus_HK)
    (B, T, H, V), K = v_BTHV.shape, r_BTHK.shape[3]
    check_state(state_BHKV, (B, H, K, V))
    check_segments(segments, (B, T))
    given = {"r": r_BTHK, "k": k_BTHK, "v": v_BTHV, "log_decay": log_decay_BTHK, "bonus": bonus_HK}
    check_devices({**given, "state": state_BHKV, "segments": segments})
    run = FAMILIES[choose("wkv6", backend, FAMILIES, v_BTHV, r_BTHK)]
    with without_autocast(v_BTHV.device):
        out: tuple[Tensor, Tensor] = run.wkv6(r_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, bonus_HK, state_BHKV, segments)
    return out


def influence(
    r_BTHK: Tensor, k_BTHK: Tensor, log_decay_BTHK: Tensor, bonus_HK: Tensor, *, segments: Tensor | None = None
) -> Influence:
    """Return the factor in front of v_s in o_t of every head when the first state is zero.

    The arguments are those of `wkv6`, except the values; raises ConfigError as it does.
    """
    _validate(r_BTHK, k_BTHK, k_BTHK, log_decay_BTHK, bonus_HK)
    (r, k, log_decay, bonus), (B, T, H, _) = wide(r_BTHK, k_BTHK, log_decay_BTHK, bonus_HK), r_BTHK.shape
    check_segments(segments, (B, T))
    check_devices({"r": r, "k": k, "log_decay": log_decay, "bonus": bonus, "segments": segments})

    def factors(heads: slice) -> Tensor:
        own_r, own_k, decays = (x[:, :, heads] for x in (r, k, log_decay))
        return eager.factors(own_r, own_k, decays, bonus[heads], segments)

    return Influence(shape=(B, H, T), device=r.device, factors=factors)


def _validate(r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor) -> None:
    check_floating({"r": r, "k": k, "v": v, "log_decay": log_decay, "bonus": bonus})
    if r.dim() != 4 or r.shape != k.shape:
        raise ConfigError(f"r {tuple(r.shape)} and k {tuple(k.shape)} must both be [B, T, H, K].")
    if v.dim() != 4 or v.shape[:3] != r.shape[:3]:
        raise ConfigError(f"v {tuple(v.shape)} must be [B, T, H, V] with {tuple(r.shape[:3])} in front.")
    fits = log_decay.dim() == 4 and all(n in (1, m) for n, m in zip(log_decay.shape[:2], r.shape[:2], strict=True))
    if not fits or log_decay.shape[2:] != r.shape[2:]:
        raise ConfigError(f"log_decay {tuple(log_decay.shape)} must be [B or 1, T or 1, H, K] for r {tuple(r.shape)}.")
    if bonus.shape != r.shape[2:]:
        raise ConfigError(f"bonus {tuple(bonus.shape)} must be [H, K] = {tuple(r.shape[2:])}.")
    if r.shape[1] < 1:
        raise ConfigError("wkv6 needs at least one token.")
