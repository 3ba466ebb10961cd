"""Text from a trained model, token by token through the caches."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.models.language_model import Caches, LanguageModel

#: Below this temperature the most probable token is taken: its logit divided by less may be no number.
COLDEST = 1e-6


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt_BT: Tensor,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: Callable[[Tensor], bool] | None = None,
    rows: int | None = None,
) -> Tensor:
    """Return [B, new_tokens] int64 continuations.

    Args:
        model: any language model, in evaluation or training mode (there is no dropout).
        prompt_BT: int64 tokens, at least one.
        new_tokens: how many to add.
        temperature: 0 takes the most probable token; else logits are divided by it and sampled.
        top_k: sample among the k most probable tokens only.
        seed: of the sampling.
        stop: takes the tokens added so far [B, n]; no more are added once it returns true.
        rows: how many prompts are read at once, see `read_prompts`; None: all.

    Raises:
        ConfigError: an empty prompt, more tokens than the model has learned positions, a temperature that is negative
            or not finite, or `top_k` below 1.
    """
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature is {temperature}; give 0 or a positive number.")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k is {top_k}; give at least 1, or None for all tokens.")
    if prompt_BT.shape[1] == 0:
        raise ConfigError("the prompt has no token; give at least one character.")
    generator = torch.Generator(device=prompt_BT.device).manual_seed(seed)
    read = prompt_BT.shape[1] + max(0, new_tokens - 1)  # the last new token is not read
    caches = model.init_cache(prompt_BT.shape[0], read)
    logits = read_prompts(model, prompt_BT, caches, rows or len(prompt_BT))
    chosen = []
    for index in range(new_tokens):
        chosen.append(_choose(logits, temperature, top_k, generator))
        if stop is not None and stop(torch.cat(chosen, dim=1)):
            break
        if index + 1 < new_tokens:
            logits = model.step(chosen[-1], caches)
    return torch.cat(chosen, dim=1) if chosen else prompt_BT[:, :0]


def read_prompts(model: LanguageModel, prompts_BT: Tensor, caches: Caches, rows: int) -> Tensor:
    """Read prompts into empty caches, `rows` sequences at once; return the logits of the next tokens [B, vocab].

    Equals `model.prefill`, with the activations of `rows` sequences in memory.
    """
    if rows >= len(prompts_BT):
        return model.prefill(prompts_BT, caches)
    starts = range(0, len(prompts_BT), rows)
    parts = [[cache.rows(start, start + rows) for cache in caches] for start in starts]
    logits = []
    for start, part in zip(starts, parts, strict=True):
        logits.append(model.prefill(prompts_BT[start : start + rows], part))
        for whole, own in zip(caches, part, strict=True):
            whole.write(own, start)
    return torch.cat(logits)


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    if temperature < COLDEST:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
