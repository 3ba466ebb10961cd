"""Language models: one `LanguageModel` for every architecture, built from a backbone and sequence mixers."""

from basecap.models.backbones import BACKBONES
from basecap.models.config import LayerConfig, ModelConfig, model_config
from basecap.models.language_model import LanguageModel

__all__ = ["BACKBONES", "LanguageModel", "LayerConfig", "ModelConfig", "model_config"]
