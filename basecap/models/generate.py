"""Text from a trained model, token by token through the caches."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

from basecap.errors import ConfigError
from basecap.mixers import generator_for
from basecap.models.decoding_steps import Lengths, steps_of
from basecap.models.language_model import Caches, LanguageModel
from basecap.models.prompts import AT_ONCE
from basecap.ops import running_sums

#: Below this temperature the most probable token is taken: its logit divided by less may be no number.
COLDEST = 1e-6


def is_whole(value: object) -> bool:
    """Whether something is a whole number, also one of NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


class Sampling(NamedTuple):
    """How the next token is chosen; see `generate_each`."""

    temperature: float
    top_k: int | None
    seed: int

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature < COLDEST

    def refuse(self) -> None:
        """Raise ConfigError for a temperature that is negative or no finite number, or `top_k` below 1."""
        if not isinstance(self.temperature, Real) or not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature!r}; give 0 or a positive number.")
        if self.top_k is not None and (not is_whole(self.top_k) or self.top_k < 1):
            raise ConfigError(f"top_k is {self.top_k!r}; give a whole number, at least 1, or None for all tokens.")
        if not is_whole(self.seed):
            raise ConfigError(f"seed is {self.seed!r}; give a whole number.")

    def choose(self, logits_BV: Tensor, draw_B: Tensor) -> Tensor:
        """Return the token of each row at which the sum of probabilities exceeds its draw from 0 to 1: int64 [B].

        The most probable one if `greedy`.
        """
        if self.greedy:
            return logits_BV.argmax(-1)
        logits_BV = logits_BV.float() / self.temperature
        if self.top_k is not None:
            least = logits_BV.topk(min(self.top_k, logits_BV.shape[-1])).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least, -torch.inf)
        reached = running_sums(logits_BV.double().softmax(-1), -1)
        token = torch.searchsorted(reached, draw_B[:, None] * reached[:, -1:], right=True)
        return token[:, 0].clamp(max=logits_BV.shape[1] - 1)


def generate(
    model: LanguageModel,
    prompt_BT: Tensor,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    rows: int | None = None,
) -> Tensor:
    """Return [B, new_tokens] int64 continuations of prompts of one length, int64 [B, T].

    Arguments and errors are those of `generate_each`, and:

    Args:
        rows: how many prompts are read at once, see `read_prompts`; None: all.
    """

    def read(prompts: Sequence[Tensor], caches: Caches) -> Tensor:
        whole_BT = prompt_BT.to(model.embedding.weight.device)
        return read_prompts(model, whole_BT, caches, len(prompts) if rows is None else rows)

    added = _continue(model, [*prompt_BT], new_tokens, Sampling(temperature, top_k, seed), read)
    return torch.tensor(added, dtype=torch.int64, device=prompt_BT.device).view(len(prompt_BT), max(0, new_tokens))


def generate_each(
    model: LanguageModel,
    prompts: Sequence[Tensor],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    ends: Sequence[Callable[[list[int]], bool]] | None = None,
    at_once: int = AT_ONCE,
) -> list[list[int]]:
    """Return the continuation of each prompt, at most `new_tokens` tokens.

    A prompt is continued as if it were alone: its random numbers are a function of `seed`, its tokens, and the number
    of equal prompts before it.

    Args:
        model: any language model, in evaluation or training mode (there is no dropout).
        prompts: int64 [T] each, of any lengths, at least one token.
        new_tokens: how many to add.
        temperature: 0 takes the most probable token; else logits are divided by it and sampled.
        top_k: sample among the k most probable tokens only.
        seed: of the sampling.
        ends: for each prompt what takes the tokens added so far; no more are added to it once this returns true.
        at_once: most tokens of prompts in a pass, which has at least one prompt.

    Raises:
        ConfigError: an empty prompt, more tokens than the model has learned positions, a temperature that is negative
            or not finite, or `top_k` below 1.
    """
    read = partial(model.prefill_each, at_once=at_once)
    return _continue(model, prompts, new_tokens, Sampling(temperature, top_k, seed), read, ends)


@torch.no_grad()
def _continue(
    model: LanguageModel,
    prompts: Sequence[Tensor],
    new_tokens: int,
    sampling: Sampling,
    read: Callable[[Sequence[Tensor], Caches], Tensor],
    ends: Sequence[Callable[[list[int]], bool]] | None = None,
) -> list[list[int]]:
    """Return the continuation of each prompt; `read` fills empty caches with them and returns the next logits."""
    sampling.refuse()
    if any(not len(prompt) for prompt in prompts):
        raise ConfigError("the prompt has no token; give at least one character.")
    found: list[list[int]] = [[] for _ in prompts]
    if not prompts or new_tokens < 1:
        return found
    device, rows_of = model.embedding.weight.device, [*range(len(prompts))]
    draws_BN = _draws(prompts, new_tokens, sampling).to(device)
    # The last new token is not read.
    most = max(map(len, prompts)) + new_tokens - 1
    caches = model.init_cache(len(prompts), most)
    logits = read(prompts, caches)
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    lengths = Lengths(lengths_B, max(map(len, prompts)), most)
    steps, going = steps_of(model, caches, sampling.choose, lengths), {*range(len(prompts))}
    del caches  # else those of sequences that ended would stay in memory
    chosen = sampling.choose(logits, draws_BN[:, 0])
    for index in range(1, new_tokens + 1):
        for prompt, token in zip(rows_of, chosen.tolist(), strict=True):
            if prompt in going:
                found[prompt].append(token)
        if ends is not None:
            going -= {prompt for prompt in going if ends[prompt](found[prompt])}
        if not going or index == new_tokens:
            break
        if steps.drops(len(going), len(rows_of)):
            kept = [row for row, prompt in enumerate(rows_of) if prompt in going]
            places = torch.tensor(kept, device=device)
            chosen, draws_BN, steps = chosen[places], draws_BN[places], steps.take(places)
            rows_of = [rows_of[row] for row in kept]
        chosen = steps(chosen, draws_BN[:, index])
    return found


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


def by_length(lengths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Yield batches of indices, those of the longest first; padded to its longest, a batch has at most `room` tokens.

    A batch has at least one index.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        most = max(1, room // max(1, lengths[order[0]]))
        yield order[:most]
        order = order[most:]


def _draws(prompts: Sequence[Tensor], new_tokens: int, sampling: Sampling) -> Tensor:
    """Return numbers from 0 to 1, one for each new token: [B, new_tokens], on the CPU; float64, or zeros if greedy."""
    if sampling.greedy:
        return torch.zeros(len(prompts), new_tokens)
    earlier, rows = Counter[str](), []
    for prompt in prompts:
        words = ",".join(map(str, prompt.tolist()))
        generator = generator_for(sampling.seed, f"{earlier[words]} {words}")
        rows.append(torch.rand(new_tokens, generator=generator, dtype=torch.float64))
        earlier[words] += 1
    return torch.stack(rows)
