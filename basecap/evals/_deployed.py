"""The model that an evaluation lets write text."""

import torch

from basecap.errors import ConfigError
from basecap.evals._contract import Context
from basecap.mixers import Mixer
from basecap.models.language_model import LanguageModel


def deployed(model: LanguageModel, context: Context) -> LanguageModel:
    """Return the model as it would be used: a copy in 16 bits where the context computes in them, else itself."""
    with context.autocast():
        kind = context.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    if dtype == torch.float32:
        return model
    copy = LanguageModel(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.to(context.device, dtype).eval()


def refuse_positions(name: str, model: LanguageModel, read: int) -> None:
    """Raise ConfigError if the model has parameters for each position, and fewer than the tokens that it has to read.

    Args:
        name: of the evaluation.
        model: any model.
        read: tokens of its longest sequence.
    """
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    trained = model.config.max_length
    if read <= trained or (model.positions is None and all(mixer.takes_longer for mixer in mixers)):
        return
    raise ConfigError(
        f"{name}: a sequence may have {read:,} tokens, and this model has parameters for {trained:,} positions; "
        "shorten it, raise data.seq_len, or leave out this architecture."
    )
