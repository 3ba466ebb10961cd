"""Top-1 element selection: the output is the value of the single key with the highest score."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from basecap.mixers._contract import Cache, Mixer, MixerConfig, mixer
from basecap.mixers._layer import LayerSpec
from basecap.mixers._parts import AttentionHeads, attention_recipe, remember
from basecap.mixers._recipes import ParameterRecipe
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
class Top1Element(Mixer):
    """Multi-head causal selection of one value, o_t = v_s with s = argmax_{s <= t} q_t.k_s.

    Queries and keys are normalised per head, then rotated. The backward pass uses the choice for the values and
    the softmax for queries and keys (straight-through).
    """

    class Config(MixerConfig):
        """Options of Top-1 element selection."""

        heads: int | None = Field(None, ge=1, description="query heads; hidden / 64 when not given")
        kv_heads: int | None = Field(None, ge=1, description="key and value heads; as many as heads when not given")
        position: Literal["rope", "none"] = "rope"
        rope_base: float = Field(10_000.0, gt=0)
        qk_gain: bool = Field(False, description="learned gain of the normalised queries and keys")
        temperature: float = Field(1.0, gt=0, description="of the softmax that gives the gradient")

    sizes: ClassVar = {768: {"heads": 12}, 2048: {"heads": 16}}

    def __init__(self, config: Config, layer: LayerSpec):
        super().__init__(config, layer)
        self.project = AttentionHeads(
            layer.hidden,
            config.heads,
            config.kv_heads,
            rope_base=config.rope_base if config.position == "rope" else None,
            norm="gain" if config.qk_gain else "plain",
        )
        self.out = nn.Linear(layer.hidden, layer.hidden, bias=False)
        self.scale = self.project.dim**-0.5 / config.temperature

    @property
    def exact_gradient(self) -> bool:
        """False: the derivative of a choice is zero, so queries and keys are trained with that of the softmax."""
        return False

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Select; see `Mixer.forward`."""
        q, k, v = self.project(x_BTD, segments)
        return self.out(top1_element(q, k, v, scale=self.scale, segments=segments).flatten(2))

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """Keys and values of every token, [B, max_length, G, K] each."""
        return self.project.init_cache(batch, max_length)

    def step(self, x_B1D: Tensor, cache: Cache) -> Tensor:
        """Select for one more token."""
        q, k, v = self.project(x_B1D, start=cache.length)
        o_B1HK = top1_element_step(q, k, v, cache.tensors, cache.length)
        cache.length += 1
        return self.out(o_B1HK.to(q.dtype).flatten(2))

    def prefill(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        """Select over a whole prompt and keep its keys and values."""
        q, k, v = self.project(x_BTD)
        remember(cache, {"k": k, "v": v})
        return self.out(top1_element(q, k, v, scale=self.scale).flatten(2))

    def influence(self, x_BTD: Tensor) -> Influence:
        """Return 1 at the chosen key, 0 elsewhere."""
        q, k, _ = self.project(x_BTD)
        return influence(q, k)

    def mixed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of every query head, and the chosen ones."""
        q, k, v = self.project(x_BTD)
        return self.project.values(v), top1_element(q, k, v, scale=self.scale)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Normal(0.02), the output projection shrunk with depth."""
        return attention_recipe(self.project, self.out, self.layer)

    def flops(self, length: int) -> float:
        """Projections plus the causal half of the scores; values are copied."""
        linear = self.project.qkv.weight.numel() + self.out.weight.numel()
        return 2.0 * length * linear + length * (length + 1.0) * self.layer.hidden

    def training_flops(self, length: int) -> float:
        """Three times the projections, and four products of visible pairs: the scores, and three in the backward pass.

        These are the gradients of the softmax, the queries and the keys; gradients of values are copied.
        """
        linear = self.project.qkv.weight.numel() + self.out.weight.numel()
        return 6.0 * length * linear + 4.0 * length * (length + 1.0) * self.layer.hidden

    def state_bytes(self, length: int) -> int:
        """Keys and values of every token."""
        return self.project.state_bytes(length)
