"""Entropy of each layer's influence, which arXiv 2505.18522 changes with the softmax temperature."""

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from basecap.data import PreparedData
from basecap.data.config import Count
from basecap.errors import DataError
from basecap.evals._contract import Context, EvaluationConfig, Measurement, Outcome, SharedEvaluation, evaluation
from basecap.evals._influence import map_layers, normalised
from basecap.evals._openings import openings
from basecap.models.language_model import LanguageModel
from basecap.ops import Influence
from basecap.ops.attention import entropy


@evaluation("influence-entropy", unit="nats", better="neither", axes=("layer",))
class InfluenceEntropy(SharedEvaluation[PreparedData]):
    """Mean entropy of the factors of past values at each position, per layer (arXiv 2505.18522, figure 4).

    The factors are the absolute values of `Mixer.influence`, normalised over the past; in softmax attention they are
    the attention distribution. Layers without `influence` are left out.
    """

    class Config(EvaluationConfig):
        """Options of influence-entropy."""

        split: Literal["validation", "test"] = Field("validation", description="split of the documents")
        windows: Count = Field(4, ge=1, le=2**20, description="number of documents per domain")
        length: Count = Field(256, ge=2, description="tokens per document; longer documents are cut, shorter skipped")

    config: Config
    needs = "text"
    reduced_by = "windows or length of influence-entropy"

    def check(self, data: PreparedData, length: int) -> None:
        """Raise DataError if a domain has no document that is long enough."""
        for domain in data.domains:
            self._rows(data, domain, length)

    def tokens_read(self, data: PreparedData, length: int) -> int:
        """Return how many tokens the windows have."""
        return sum(self._rows(data, domain, length).size for domain in data.domains)

    def run(self, model: LanguageModel, context: Context[PreparedData]) -> Outcome:
        """Return the mean over heads and positions by layer, of this process's domains; raises as `check` does."""
        measurements = []
        for domain in context.data.domains[context.rank :: context.world]:
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
        """Return the first tokens of a domain's first long enough documents: int64 [windows, length]."""
        length = min(self.config.length, longest)
        rows = openings(data, self.config.split, domain, length, self.config.windows)
        if not rows.size:
            raise DataError(
                f"no {self.config.split} document of {domain!r} has {length} tokens; "
                "lower the length of influence-entropy."
            )
        return rows


def layer_entropies(model: LanguageModel, tokens_BT: Tensor) -> dict[int, float]:
    """Return the mean entropy in nats of each layer with an influence, by layer index from 0."""
    return map_layers(model, tokens_BT, _mean_entropy)


def _mean_entropy(influence: Influence) -> float:
    B, H, T = influence.shape
    return sum(entropy(normalised(factors.float())).sum().item() for factors in influence.blocks()) / (B * H * T)
