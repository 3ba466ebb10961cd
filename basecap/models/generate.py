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
    stop: Callable[[Tensor], bool] | None = None,
    rows: int | None = None,
) -> Tensor:
    """Return [B, new_tokens] int64 continuations of prompts of one length, int64 [B, T].

    Arguments and errors are those of `generate_each`, and:

    Args:
        stop: takes the tokens added so far [B, n]; no more are added once it returns true.
        rows: how many prompts are read at once, see `read_prompts`; None: all.
    """
    sampling, ended = Sampling(temperature, top_k, seed), None
    if stop is not None:
        ended = partial(_all_at_once, stop)
    added = _continue(model, [*prompt_BT], new_tokens, sampling, ended, rows)
    shape = (len(prompt_BT), len(added[0]) if added else 0)
    return torch.tensor(added, dtype=torch.int64, device=prompt_BT.device).view(shape)


def _all_at_once(stop: Callable[[Tensor], bool], found: list[list[int]]) -> list[bool]:
    return [stop(torch.tensor(found))] * len(found)


def generate_each(
    model: LanguageModel,
    prompts: Sequence[Tensor],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    ends: Callable[[list[int]], bool] | None = None,
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
        ends: takes the tokens added to a prompt so far; no more are added to it once this returns true.

    Raises:
        ConfigError: an empty prompt, more tokens than the model has learned positions, a temperature that is negative
            or not finite, or `top_k` below 1.
    """
    ended = None if ends is None else lambda found: [ends(tokens) for tokens in found]
    return _continue(model, prompts, new_tokens, Sampling(temperature, top_k, seed), ended, None)


@torch.no_grad()
def _continue(
    model: LanguageModel,
    prompts: Sequence[Tensor],
    new_tokens: int,
    sampling: Sampling,
    ended: Callable[[list[list[int]]], list[bool]] | None,
    rows: int | None,
) -> list[list[int]]:
    """Return the continuation of each prompt; `ended` says of those that go on which have reached their end."""
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
    if rows is None:
        logits = model.prefill_each(prompts, caches)
    else:
        logits = read_prompts(model, torch.stack(list(prompts)), caches, rows)
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    lengths = Lengths(lengths_B, max(map(len, prompts)), most)
    steps, going = steps_of(model, caches, sampling.choose, lengths), {*range(len(prompts))}
    chosen = sampling.choose(logits, draws_BN[:, 0])
    for index in range(1, new_tokens + 1):
        for prompt, token in zip(rows_of, chosen.tolist(), strict=True):
            if prompt in going:
                found[prompt].append(token)
        if ended is not None:
            asked = [prompt for prompt in rows_of if prompt in going]
            going -= {
                prompt for prompt, end in zip(asked, ended([found[prompt] for prompt in asked]), strict=True) if end
            }
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
