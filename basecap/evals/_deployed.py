"""The model that an evaluation lets write text."""

import torch

from basecap.evals._contract import Context
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
