"""The choice of tokens and the indexer's loss in Triton; see README.md."""

from torch import Tensor

from basecap.ops._dispatch import TRITON, unsupported_by_triton

RUNS, BACKEND = TRITON, "triton"

#: The most channels of a head, and the most tokens, whose scores one program holds.
WIDEST, LONGEST = 128, 32_768


def supports(*queries_BTXK: Tensor) -> str | None:
    """Return why the kernels cannot run, or None."""
    for q_BTXK in queries_BTXK:
        if q_BTXK.shape[1] > LONGEST:
            return f"the kernels take at most {LONGEST:,} tokens, not {int(q_BTXK.shape[1]):,}"
        reason = unsupported_by_triton(q_BTXK, widest=WIDEST)
        if reason is not None:
            return reason
    return None
