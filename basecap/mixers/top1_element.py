"""Top-1 element selection: the output is the value of the single key with the highest score."""

from pydantic import Field
from torch import Tensor

from basecap.mixers._attention import SelectionConfig, StepwiseMixer
from basecap.mixers._contract import Cache, mixer
from basecap.mixers._parts import remember
from basecap.mixers._recipes import LayerSpec
from basecap.ops import Influence
from basecap.ops.top1_element import influence, top1_element, top1_element_step


@mixer(
    "top1-element",
    backbone="transformer++",
    paper="arXiv 2505.18522, section 4",
    summary="the value of the best key alone, trained straight through the softmax",
    source="our choice: the authors publish no code and name no initial values",
    differences=("Everything starts as in transformer++, so that only the selection differs.",),
)
class Top1Element(StepwiseMixer):
    """Multi-head causal selection of one value, o_t = v_s with s = argmax_{s <= t} q_t.k_s.

    Queries and keys are normalised per head, then rotated. The backward pass uses the choice for the values and
    the softmax for queries and keys (straight-through).
    """

    class Config(SelectionConfig):
        """Options of Top-1 element selection."""

        temperature: float = Field(1.0, gt=0, description="of the softmax that gives the gradient")

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer, norm="gain" if config.qk_gain else "plain")
        self.scale = self.project.dim**-0.5 / config.temperature

    @property
    def exact_gradient(self) -> bool:
        """False: the derivative of a choice is zero, so queries and keys are trained with that of the softmax."""
        return False

    def attend(self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor:
        """Select; see `HeadedMixer.attend`."""
        return top1_element(q, k, v, scale=self.scale, segments=segments)

    def store(self, k: Tensor, v: Tensor, cache: Cache) -> None:
        """Append to the cache; see `HeadedMixer.store`."""
        remember(cache, {"k": k, "v": v})

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Keys and values of every token, [B, max_length, G, K] each."""
        return self.project.init_cache(batch, max_length)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, lengths: Tensor | None) -> Tensor:
        """Select for one more token; see `StepwiseMixer.attend_next`."""
        return top1_element_step(q, k, v, cache.tensors, cache.length, lengths=lengths).to(q.dtype)

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return 1 at the chosen key, 0 elsewhere."""
        q, k, _ = self.project(x_BTD)
        return influence(q, k)

    def flops(self, length: int) -> float:
        """Projections plus the causal half of the scores; values are copied."""
        return self.projection_flops(length) + length * (length + 1.0) * self.layer.hidden

    def training_flops(self, length: int) -> float:
        """Three times the projections, and four products of visible pairs: the scores, and three in the backward pass.

        These are the gradients of the softmax, the queries and the keys; gradients of values are copied.
        """
        return 3.0 * self.projection_flops(length) + 4.0 * length * (length + 1.0) * self.layer.hidden

    def state_bytes(self, length: int) -> int:
        """Keys and values of every token."""
        return self.project.state_bytes(length)
