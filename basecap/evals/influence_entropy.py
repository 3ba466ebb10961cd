"""How spread out a mixer's influence is: the entropy that the first paper lowers with the softmax temperature."""

import itertools
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from basecap.data import PreparedData
from basecap.data.config import Count
from basecap.errors import DataError
from basecap.evals._contract import Context, Evaluation, EvaluationConfig, Measurement, Outcome, evaluation
from basecap.evals._influence import of_layers
from basecap.models.language_model import LanguageModel
from basecap.ops import Influence
from basecap.ops.attention import entropy


@evaluation("influence-entropy", unit="nats", better="lower", axes=("layer",))
class InfluenceEntropy(Evaluation[PreparedData]):
    """Mean entropy of the factors with which each position mixes past values, per layer (arXiv 2505.18522, fig. 4).

    The factors are those of `Mixer.influence`, taken absolutely and normalised over the past; for softmax attention
    they are the attention distribution. A layer whose mixer has no influence matrix is left out.
    """

    class Config(EvaluationConfig):
        """Options of influence-entropy."""

        split: Literal["validation", "test"] = Field("validation", description="which held-out documents")
        windows: Count = Field(4, ge=1, le=2**20, description="documents per domain, each one's first tokens")
        length: Count = Field(
            256, ge=2, description="tokens of a document; a longer one is cut, a shorter one not used"
        )

    config: Config
    needs = "text"

    def check(self, data: PreparedData, length: int) -> None:
        """Raise DataError when a domain has no such documents, or too short ones alone."""
        for domain in (*data.train_domains, *data.ood_domains):
            self._rows(data, domain, length)

    def run(self, model: LanguageModel, context: Context[PreparedData]) -> Outcome:
        """Return per domain and layer the mean over heads and positions; raises DataError as `check` does."""
        measurements = []
        for domain in (*context.data.train_domains, *context.data.ood_domains):
            rows = self._rows(context.data, domain, model.config.max_length)
            with context.autocast():
                entropies = layer_entropies(model, torch.from_numpy(rows).to(context.device))
            measurements += [
                Measurement(subset=domain, metric="entropy", value=value, n=rows.size, axis={"layer": float(layer)})
                for layer, value in entropies.items()
            ]
        return Outcome(measurements=measurements)

    def trial(self, model: LanguageModel, context: Context[PreparedData]) -> None:
        """Compute the entropies of one domain."""
        rows = self._rows(context.data, context.data.train_domains[0], model.config.max_length)
        with context.autocast():
            layer_entropies(model, torch.from_numpy(rows).to(context.device))

    def _rows(self, data: PreparedData, domain: str, longest: int) -> np.ndarray:
        """Return the first tokens of a domain's first documents that are long enough: int64 [windows, length]."""
        length, documents = min(self.config.length, longest), data.documents(self.config.split, domain)
        every = (documents.tokens(index)[:length] for index in range(len(documents)))
        rows = list(itertools.islice((tokens for tokens in every if len(tokens) == length), self.config.windows))
        if not rows:
            raise DataError(
                f"no {self.config.split} document of {domain!r} has {length} tokens; "
                "lower the length of influence-entropy."
            )
        return np.stack(rows)


def layer_entropies(model: LanguageModel, tokens_BT: Tensor) -> dict[int, float]:
    """Return the mean entropy in nats of each layer that has an influence matrix, by its index from 0."""
    return of_layers(model, tokens_BT, _mean_entropy)


def _mean_entropy(influence: Influence) -> float:
    B, H, T = influence.shape
    return sum(entropy(normalised(factors.float())).sum().item() for factors in influence.blocks()) / (B * H * T)


def normalised(factors: Tensor) -> Tensor:
    """Return |factors| with sum 1 over the last dimension; zeros stay zeros."""
    sizes = factors.abs()
    return sizes / sizes.sum(-1, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)
