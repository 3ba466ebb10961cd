"""How spread out a mixer's influence is: the entropy that the first paper lowers with the softmax temperature."""

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from basecap.errors import DataError
from basecap.evals._contract import Context, Evaluation, EvaluationConfig, Measurement, Outcome, evaluation
from basecap.mixers import Mixer
from basecap.models.language_model import LanguageModel
from basecap.ops.attention import entropy


@evaluation("influence-entropy", unit="nats", better="lower", axes=("layer",))
class InfluenceEntropy(Evaluation):
    """Mean entropy of the factors with which each position mixes past values, per layer (arXiv 2505.18522, fig. 4).

    The factors are those of `Mixer.influence`, taken absolutely and normalised over the past; for softmax attention
    they are the attention distribution. A layer whose mixer has no influence matrix is left out.
    """

    class Config(EvaluationConfig):
        """Options of influence-entropy."""

        split: Literal["validation", "test"] = Field("validation", description="which held-out documents")
        windows: int = Field(4, ge=1, description="documents per domain, each one's first tokens")
        length: int = Field(256, ge=2, description="tokens of a document; a longer one is cut, a shorter one not used")

    config: Config

    def run(self, model: LanguageModel, context: Context) -> Outcome:
        """Return per domain and layer the mean over heads and positions; raises DataError for too short documents."""
        length = min(self.config.length, model.config.max_length)
        measurements = []
        for domain in (*context.data.train_domains, *context.data.ood_domains):
            documents = context.data.documents(self.config.split, domain)
            lengthy = [index for index in range(len(documents)) if len(documents.tokens(index)) >= length]
            if not lengthy:
                raise DataError(
                    f"no {self.config.split} document of {domain!r} has {length} tokens; "
                    "lower the length of influence-entropy."
                )
            rows = np.stack([documents.tokens(index)[:length] for index in lengthy[: self.config.windows]])
            with context.autocast():
                entropies = layer_entropies(model, torch.from_numpy(rows).to(context.device))
            measurements += [
                Measurement(subset=domain, metric="entropy", value=value, n=rows.size, axis={"layer": float(layer)})
                for layer, value in entropies.items()
            ]
        return Outcome(measurements=measurements)


def layer_entropies(model: LanguageModel, tokens_BT: Tensor) -> dict[int, float]:
    """Return the mean entropy in nats of each layer that has an influence matrix, by its index from 0."""
    found: dict[int, float] = {}

    def look(mixer: Mixer, inputs: tuple[Tensor, ...]) -> None:
        factors = mixer.influence(inputs[0])
        if factors is not None:
            found[mixer.layer.index] = entropy(normalised(factors.float())).mean().item()

    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    handles = [mixer.register_forward_pre_hook(look) for mixer in mixers]
    try:
        with torch.no_grad():
            model.hidden(tokens_BT)
    finally:
        for handle in handles:
            handle.remove()
    return found


def normalised(factors: Tensor) -> Tensor:
    """Return |factors| with sum 1 over the last dimension; zeros stay zeros."""
    sizes = factors.abs()
    return sizes / sizes.sum(-1, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)
