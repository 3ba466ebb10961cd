"""The models that a benchmark compares, and how: the others with the first, on each attention kernel of the device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from basecap.errors import ConfigError
from basecap.mixers import ARCHITECTURES
from basecap.models.config import ModelConfig, model_config
from basecap.models.language_model import LanguageModel
from basecap.models.outline import outline
from basecap.names import split_backbone
from basecap.plan.estimate import UTILISATION, matrix_rate
from basecap.plan.runs import model_of
from basecap.study.config import load_study, select, with_named
from basecap.system.progress import duration

#: Models by the name that their rows have.
Contenders = dict[str, ModelConfig]
#: A line of a table.
Row = dict[str, Any]

#: PyTorch's attention kernels on a GPU: the first contender runs with each, the others are compared with all of them.
ATTENTIONS = {"FlashAttention-2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
#: Seconds from which a measurement is said to be long.
LONG = 60
#: What a comparison with the fastest of `ATTENTIONS` is called.
FASTEST = "its fastest attention"


def named(names: Sequence[str], *, hidden: int, vocab: int, length: int) -> Contenders:
    """Return architectures at one size; all of them when `names` is empty.

    Args:
        names: architectures, also in another backbone, as "top1-chunk-exact in rwkv-7".
        hidden: model width.
        vocab: vocabulary size.
        length: tokens per sequence, which learned positions must cover.

    Raises:
        ConfigError: an unknown architecture, or a size at which one cannot be built.
    """
    found: Contenders = {}
    for name in list(names) or ARCHITECTURES.names():
        use, backbone = split_backbone(name)
        found[name] = model_config(use, hidden=hidden, vocab=vocab, max_length=length, backbone=backbone)
    _refuse_impossible(found)
    return found


def of_study(study: str, names: Sequence[str], *, scale: str | None, length: int | None) -> Contenders:
    """Return the architectures of a study, with its options, width and vocabulary, as `basecap plan` builds them.

    Args:
        study: name or YAML file of a study.
        names: those of its architectures to take, beside the reference, and any others where the study takes them; all
            when empty.
        scale: size of the study; None: as `basecap run` takes it.
        length: tokens per sequence, which learned positions must cover; None: those of the study.

    Raises:
        ConfigError: what `basecap plan` refuses in a study, an architecture that it does not have, or a size at which
            one cannot be built.
    """
    config = with_named(load_study(study, scale=scale), names)
    chosen = select(config, names)
    entries = [entry for entry in config.architectures if entry.name in chosen]
    models = {entry.name: model_of(config, entry, config.vocabulary) for entry in entries}
    found = {name: model.model_copy(update={"max_length": length or config.length}) for name, model in models.items()}
    _refuse_impossible(found)
    return found


def announcement(operations: float, device: torch.device) -> str | None:
    """Return how long a benchmark of this many operations takes on a CPU, and what to do; None if it is short."""
    seconds = operations / UTILISATION[0] / matrix_rate(device) if device.type == "cpu" else 0.0
    if seconds < LONG:
        return None
    smaller = "choose smaller ones, or small models with --study quickstart"
    return f"at these sizes this takes at least {duration(seconds)} on this CPU; {smaller}."


def entries(contenders: Contenders, device: torch.device) -> list[tuple[str, str | None, ModelConfig]]:
    """Return name, attention and model of every row.

    On a GPU the first model has a row for each of `ATTENTIONS`, if it uses PyTorch's attention.
    """
    found: list[tuple[str, str | None, ModelConfig]] = []
    for index, (name, config) in enumerate(contenders.items()):
        several = device.type == "cuda" and index == 0 and _attends(config)
        found += [(name, attention, config) for attention in (ATTENTIONS if several else [None])]
    return found


class _AttentionCalls(TorchFunctionMode):
    """Counts calls of PyTorch's attention."""

    count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += function is F.scaled_dot_product_attention
        return function(*args, **kwargs or {})


def _attends(config: ModelConfig) -> bool:
    """Return whether decoding calls PyTorch's attention, the kernel of which can be chosen; nothing is computed."""
    with FakeTensorMode(), torch.no_grad(), _AttentionCalls() as calls:
        model = LanguageModel(config)
        model.step(torch.zeros((1, 1), dtype=torch.int64), model.init_cache(1, 1))
    return calls.count > 0


def with_attention(attention: str | None, job: Callable[[], Row]) -> Row:
    """Return the row of `job`, run with one of `ATTENTIONS`; with PyTorch's own choice when None."""
    if attention is None:
        return job()
    # PyTorch would take compiled code from its cache that calls another attention: its keys do not hold this choice.
    torch.compiler.config.cache_key_tag = attention
    try:
        with sdpa_kernel(ATTENTIONS[attention]):
            return job()
    finally:
        torch.compiler.config.cache_key_tag = ""


def compare(rows: Sequence[Row], speeds: Mapping[str, str]) -> None:
    """Add the speeds relative to the rows of the first contender, and to the fastest of these.

    Args:
        rows: with `architecture`, `attention` and, where the model could run, the speeds; changed in place.
        speeds: key of a speed, higher is better -> what the keys of its ratios start with.
    """
    name = rows[0]["architecture"]
    rivals = [row for row in rows if row["architecture"] == name]
    for speed, start in speeds.items():
        bases = {f" with {row['attention']}" if row["attention"] else "": row.get(speed) for row in rivals}
        if len(rivals) > 1:
            bases[f" with {FASTEST}"] = max((row[speed] for row in rivals if speed in row), default=None)
        for suffix, base in bases.items():
            for row in rows:
                row[f"{start}relative to {name}{suffix}"] = row[speed] / base if base and speed in row else None


def label(row: Row) -> str:
    """Return the name of a row on the terminal: the architecture, with its attention kernel if that was chosen."""
    return " with ".join(filter(None, (row["architecture"], row["attention"])))


def _refuse_impossible(contenders: Contenders) -> None:
    """Raise ConfigError when a model cannot be built at its size on any machine."""
    for name, config in contenders.items():
        try:
            outline(config)
        except ConfigError as error:
            raise ConfigError(f"architecture {name!r} at width {config.hidden}: {error}") from error
