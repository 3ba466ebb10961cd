"""Canon layers (ssrn 5240330): short causal convolutions with a residual, at up to four places of a block."""

from torch import Tensor, nn

from basecap.mixers._parts import ShortConvolution
from basecap.mixers._recipes import ParameterRecipe

#: Tokens that a Canon layer sees.
WIDTH = 4


class Canon(nn.Module):
    """x_t + sum_j w_j x_{t-3+j} in each channel, without bias and activation; tokens before the start are zeros.

    The cache holds the last three inputs, [B, 3, D].
    """

    def __init__(self, channels: int):
        super().__init__()
        self.conv = ShortConvolution(channels, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor, segments: Tensor | None = None) -> Tensor:
        """Convolve; no token reads across the start of its segment (`segments` as in `Mixer.forward`)."""
        return x_BTD + self.conv(x_BTD, segments)

    def init_cache(self, batch: int) -> Tensor:
        """Return the zeroed last inputs."""
        return self.conv.init_cache(batch)

    def extend(self, x_BTD: Tensor, last: Tensor) -> Tensor:
        """Convolve a prompt, with an empty cache, or further tokens; updates `last` in place."""
        convolve = self.conv.step if x_BTD.shape[1] == 1 else self.conv.further
        return x_BTD + convolve(x_BTD, last)

    def recipe(self) -> dict[str, ParameterRecipe]:
        """Uniform in +-1/2, with weight decay, as published."""
        return {f"conv.{name}": recipe for name, recipe in self.conv.recipe().items()}

    def flops(self, length: int) -> float:
        """Floating-point operations over `length` tokens, forward (multiply-add = 2)."""
        return 2.0 * length * self.conv.weight.numel()

    def state_bytes(self) -> int:
        """Bytes of `init_cache(1)`."""
        return (WIDTH - 1) * self.conv.weight.shape[0] * self.conv.weight.element_size()
