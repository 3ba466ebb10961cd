"""The models that a benchmark compares: architectures by name at one size, or those of a study as it has them."""

from collections.abc import Sequence

import torch

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES
from basecap.models.config import ModelConfig, model_config
from basecap.models.language_model import LanguageModel
from basecap.names import split_backbone
from basecap.study.config import load_study, select
from basecap.study.plan import model_of

#: Models by the name that their rows have.
Contenders = dict[str, ModelConfig]


def named(names: Sequence[str], *, hidden: int, vocab: int, length: int) -> Contenders:
    """Return architectures at one size; all of them when `names` is empty.

    Args:
        names: architectures, also in another's body, as "top1-chunk-exact in rwkv-7".
        hidden: model width.
        vocab: vocabulary size.
        length: tokens per sequence, which learned positions must cover.

    Raises:
        ConfigError: an unknown architecture, or a size at which one cannot be built.
    """
    found: Contenders = {}
    for name in list(names) or ARCHITECTURES.names():
        use, body = split_backbone(name)
        found[name] = model_config(use, hidden=hidden, vocab=vocab, max_length=length, backbone=body)
    _refuse_impossible(found)
    return found


def of_study(study: str, names: Sequence[str], *, scale: str | None, vocab: int, length: int) -> Contenders:
    """Return the architectures of a study, with its options and width.

    Args:
        study: name or YAML file of a study.
        names: those of its architectures to take, beside the reference; all when empty.
        scale: size of the study; None: as `basecap run` takes it.
        vocab: vocabulary size where the study leaves it to its tokenizer.
        length: tokens per sequence, which learned positions must cover.

    Raises:
        ConfigError: what `basecap plan` refuses in a study, an architecture that it does not have, or a size at which
            one cannot be built.
    """
    config = load_study(study, scale=scale)
    chosen = select(config, names)
    models = {entry.name: model_of(config, entry, vocab) for entry in config.architectures if entry.name in chosen}
    found = {name: model.model_copy(update={"max_length": length}) for name, model in models.items()}
    _refuse_impossible(found)
    return found


def _refuse_impossible(contenders: Contenders) -> None:
    """Raise ConfigError when a model cannot be built at its size on any machine."""
    for name, config in contenders.items():
        try:
            with torch.device("meta"):
                LanguageModel(config)
        except ConfigError as error:
            raise ConfigError(f"architecture {name!r} at width {config.hidden}: {error}") from error
