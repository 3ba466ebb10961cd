"""Models and attention of flash-linear-attention, as its users build them, to be timed beside our own."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from basecap.errors import ConfigError
from basecap.ops.known_bad import FLA_DELTA, known_bad_on


class Peer(NamedTuple):
    """A class of `fla.models` by its stem: XConfig and XForCausalLM."""

    stem: str
    blocks: int  # for 85M to 100M parameters without embeddings at width 768
    heads: Callable[[int], dict[str, int]]  # width -> the options whose defaults only fit width 2048
    kernels: str | None = None  # what `basecap.ops.known_bad` calls its kernels


#: Everything else is left at fla's defaults. Heads keep their default share of the width, or are the usual 64 wide. Its
#: Mamba is left out: without compiled extras one layer takes a second for a step of 2048 tokens on an H200.
PEERS = (
    Peer("Transformer", 12, lambda hidden: {"num_heads": hidden // 64}),
    Peer("Mamba2", 24, lambda hidden: {}),
    Peer("DeltaNet", 12, lambda hidden: {"num_heads": hidden // 128}, FLA_DELTA),
    Peer("GatedDeltaNet", 12, lambda hidden: {"num_heads": 6, "head_dim": hidden // 8}, FLA_DELTA),
    Peer("RWKV6", 12, lambda hidden: {"num_heads": hidden // 64}),
    Peer("RWKV7", 12, lambda hidden: {}),
)


def require() -> None:
    """Raise ConfigError unless flash-linear-attention's models are installed; its kernels alone are not enough."""
    # Looking for a submodule imports its parent, which may be missing too.
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("fla.models") is None:
        raise ConfigError("peers need the package flash-linear-attention; pip install 'basecap[gpu]'.")


def refuse_known_bad(peer: Peer, device: torch.device) -> None:
    """Raise ConfigError where the installed releases are known to compute the model wrongly on this GPU."""
    fault = known_bad_on(device).get(peer.kernels or "")
    if fault is not None:
        raise ConfigError(f"{fault}.")


def build(peer: Peer, *, hidden: int, vocab: int) -> nn.Module:
    """Return the model, untrained, on the CPU; raises what the library raises where it cannot be built."""
    models: Any = importlib.import_module("fla.models")
    config = getattr(models, f"{peer.stem}Config")
    options = {"hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": peer.blocks, **peer.heads(hidden)}
    return getattr(models, f"{peer.stem}ForCausalLM")(config(**options))


def moba(length: int, chunk: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return its mixture of block attention of q, k, v [1, length, H, K] with the own chunk and one more."""
    bounds = torch.tensor([0, length], dtype=torch.int32, device=device)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = importlib.import_module("fla.ops.moba").parallel_moba(q, k, v, bounds, length, chunk, 2)
        return out

    return attention
