"""The design principle of full-sequence arbitrary selection, as numbers of one mixer (see docs/reading.md).

A mixer with `influence` is judged by its factors. Another one is judged by the norms of d(u y_t)/d x_s for a few random
directions u, each in the place of a head; that of t itself counts as 0, as it has the gates on y_t too.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from basecap.errors import ConfigError, describe_error
from basecap.mixers import ARCHITECTURES, LayerSpec, Mixer, build_mixer, generator_for, initialise, make_generic
from basecap.models.language_model import LanguageModel
from basecap.models.mixer_inputs import visit_mixers
from basecap.names import split_backbone
from basecap.ops import without_kernels
from basecap.records.audits import Audit

#: Seed of parameters, inputs and draws.
SEED = 0
#: Tokens and width of the layers of `audits_of`; the width gives attention two heads of 64 channels.
LENGTH, HIDDEN = 256, 128
#: Sequences, as many positions (each in a sequence of its own), draws of a content and of a first query.
SEQUENCES, DRAWS, QUERIES = 6, 8, 32
#: Heads, channels or directions that are looked at, evenly spaced.
HEADS = 4
#: Steps of the search for a query, and how far the first and the last one go, in shares of the norm.
STEPS, FIRST, LAST = 16, 0.7, 0.1
#: Rows of `audit`, those of the search counted three times, as they are read forward and backward.
ROWS = QUERIES + SEQUENCES * (1 + DRAWS + 3 * (STEPS + 1))
#: A position is seen if its weight reaches this share of the mean weight in any sequence, query and head.
SEEN = 0.01
#: Weights below this share of their row's largest are not compared.
SMALL = 1e-6


def audits_of(
    name: str,
    *,
    length: int = LENGTH,
    options: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> list[Audit]:
    """Return the audit of each distinct layer of an architecture, untrained: generic parameters, normal inputs.

    Args:
        name: a registered architecture, or "X in Y".
        length: tokens of the sequences.
        options: of the mixer, on top of the architecture's.
        device: where the layers run.

    Raises:
        ConfigError: an unknown name, or a layer that cannot be built or audited.
    """
    architecture = ARCHITECTURES.get(split_backbone(name)[0])
    found = []
    for choice in (c for i, c in enumerate(architecture.layers) if c not in architecture.layers[:i]):
        spec = LayerSpec(hidden=HIDDEN, max_length=length, canon=architecture.canon)
        mixer = build_mixer(choice.mixer, choice.configure(HIDDEN, options or {}), spec)
        words = ", ".join(f"{key} {value}" for key, value in choice.options.items())
        layer = f"{type(mixer).__name__} ({words})" if words else type(mixer).__name__
        found.append(audit_untrained(mixer.eval().to(device), length, layer))
    return found


def layer_inputs(model: LanguageModel, tokens_BT: Tensor) -> dict[int, tuple[Mixer, Tensor]]:
    """Return each mixer of a model with what it reads, [B, T, D] in float32, by layer index from 0.

    Args:
        model: in evaluation mode.
        tokens_BT: int64, on the model's device.
    """
    found: dict[int, tuple[Mixer, Tensor]] = {}

    def keep(mixer: Mixer, x_BTD: Tensor) -> None:
        found[mixer.layer.index] = mixer, x_BTD

    visit_mixers(model, tokens_BT, keep)
    return dict(sorted(found.items()))


def audit_untrained(mixer: Mixer, length: int, layer: str) -> Audit:
    """Return the audit of a copy of a mixer with generic parameters and normal inputs: what its form allows.

    Args:
        mixer: in evaluation mode, any parameters.
        length: tokens of the sequences.
        layer: its name in the result.

    Raises:
        ConfigError: as `audit` does.
    """
    untrained, device = copy.deepcopy(mixer), next(mixer.parameters()).device
    initialise(untrained, untrained.recipe(), SEED)
    make_generic(untrained)
    inputs = torch.randn(2 * SEQUENCES, length, mixer.layer.hidden, generator=generator_for(SEED, "audit"))
    return audit(untrained, inputs.to(device), layer)


def audit(mixer: Mixer, inputs_NTD: Tensor, layer: str) -> Audit:
    """Return the audit of a mixer; the same for the same arguments.

    Args:
        mixer: in evaluation mode, with the parameters to look at.
        inputs_NTD: what it reads in 2 * SEQUENCES sequences of one length, at least 3; contents and queries are drawn
            from the second half of them, and put into those of the first half.
        layer: its name in the result.

    Raises:
        ConfigError: the mixer has no influence, and takes values of other layers or cannot be derived twice.
    """
    try:
        with without_kernels(), torch.no_grad():  # they have no second derivatives
            return _audit(mixer, inputs_NTD, layer)
    except (ConfigError, RuntimeError) as error:  # the code of a plugin, or an op without a second derivative
        why = str(error) if isinstance(error, ConfigError) else f"{describe_error(error)}."
        if type(mixer).influence is Mixer.influence:
            raise ConfigError(f"{layer} cannot be audited unless its mixer defines `influence`: {why}") from error
        raise ConfigError(f"{layer} cannot be audited; fix its `influence`: {why}") from error


def _audit(mixer: Mixer, inputs_NTD: Tensor, layer: str) -> Audit:
    x, others = inputs_NTD[:SEQUENCES], inputs_NTD[SEQUENCES:].flatten(0, 1)
    last = x.shape[1] - 1
    generator = generator_for(SEED, f"audit {last}")
    places = _some(torch.arange(last, device=x.device), generator)
    drawn = others[torch.randint(len(others), (DRAWS + QUERIES,), generator=generator).to(x.device)]
    contents, queries = drawn[:DRAWS], drawn[DRAWS:]
    asked = _shares(_weights(mixer, _put(x[:1].expand(QUERIES, -1, -1), last, queries)))
    seen = torch.cat([asked, _shares(_weights(mixer, x))]).amax((0, 1)) >= SEEN / (last + 1)
    read = _some(seen[:last].nonzero()[:, 0], generator)
    rows = _put(x[:1].expand(len(read), -1, -1), last, queries[_readers(asked, read)])
    found_PP = _searched(mixer, x[:1], queries, asked, places)
    own = found_PP.diagonal()
    return Audit(
        layer=layer,
        weights="jacobian" if mixer.influence(x[:1]) is None else "influence",
        visibility=(last - int(seen.nonzero().min())) / last if seen.any() else 0.0,
        relation=_relation(mixer, rows, read, contents) if len(read) else None,
        selection=own.mean().item(),
        null=((found_PP.sum() - own.sum()) / (found_PP.numel() - len(own))).item(),
    )


def _some(places: Tensor, generator: torch.Generator) -> Tensor:
    """Return up to SEQUENCES of the places, drawn."""
    return places[torch.randperm(len(places), generator=generator)[:SEQUENCES].to(places.device)]


def _readers(asked_QHT: Tensor, places_P: Tensor) -> Tensor:
    """Return the query that reads each place best, in its best head."""
    return asked_QHT.amax(1)[:, places_P].argmax(0)


def _relation(mixer: Mixer, x_NTD: Tensor, places_N: Tensor, contents_CD: Tensor) -> float | None:
    """Return how far the weights of `places_N`, one in each sequence, move with the contents there."""
    each = torch.arange(len(places_N), device=x_NTD.device)
    rows = []
    for content in contents_CD:
        changed = x_NTD.clone()
        changed[each, places_N] = content
        rows.append(_weights(mixer, changed))
    weights_CNHT = torch.stack(rows)
    own_CNH = weights_CNHT[:, each, :, places_N].swapaxes(0, 1)
    sizes_NH = own_CNH.abs().amax(0)
    read_NH = sizes_NH > SMALL * weights_CNHT.abs().amax((0, 3))
    moved_NH = ((own_CNH.amax(0) - own_CNH.amin(0)) / sizes_NH).clamp(max=1)
    return moved_NH[read_NH].mean().item() if read_NH.any() else None


def _searched(mixer: Mixer, x_1TD: Tensor, queries_QD: Tensor, asked_QHT: Tensor, places_P: Tensor) -> Tensor:
    """Return the shares [P, P] on each place (columns) after a search for one of them (rows).

    A search starts from the query that reads its place best, and climbs the log of the share of the best head, with
    the norm kept; its best input counts.
    """
    each = torch.arange(len(places_P), device=x_1TD.device)
    start = _readers(asked_QHT, places_P)
    best_PP, query_PD = asked_QHT.amax(1)[start][:, places_P], queries_QD[start]
    norm_P1 = query_PD.norm(dim=1, keepdim=True)
    rows_PTD = x_1TD.expand(len(places_P), -1, -1)
    for step in range(STEPS + 1):
        query_PD = query_PD.detach().requires_grad_()
        with torch.enable_grad():
            weights = _weights(mixer, _put(rows_PTD, x_1TD.shape[1] - 1, query_PD), differentiable=True)
            shares_PP = _shares(weights)[:, :, places_P].amax(1)
            goal = shares_PP[each, each].clamp(min=torch.finfo(weights.dtype).tiny).log().sum()
        better = shares_PP[each, each] > best_PP[each, each]
        best_PP = torch.where(better[:, None], shares_PP.detach(), best_PP)
        slope = _gradient(goal, query_PD)
        size = FIRST * (LAST / FIRST) ** (step / STEPS)
        query_PD = query_PD + size * norm_P1 * F.normalize(slope, dim=1)
        query_PD = norm_P1 * F.normalize(query_PD, dim=1)
    return best_PP


def _gradient(goal: Tensor, x: Tensor) -> Tensor:
    """Return the gradient, zero if the goal does not depend on x, as behind a hard choice."""
    slope = torch.autograd.grad(goal, x, allow_unused=True)[0] if goal.requires_grad else None
    return torch.zeros_like(x) if slope is None else slope.nan_to_num(0, 0, 0)


def _weights(mixer: Mixer, x_NTD: Tensor, differentiable: bool = False) -> Tensor:
    """Return the signed factors of all positions in the last output, [N, up to HEADS, T]; norms without influence."""
    influence = mixer.influence(x_NTD)
    if influence is None:
        return _jacobian(mixer, x_NTD, differentiable)
    count = influence.shape[1]
    heads = sorted({i * count // HEADS for i in range(HEADS)})
    return torch.cat([influence.factors(slice(head, head + 1))[:, :, -1] for head in heads], dim=1)


def _jacobian(mixer: Mixer, x_NTD: Tensor, differentiable: bool) -> Tensor:
    """Return the norm of d(u y_t)/d x_s of the last output t for HEADS directions u, [N, HEADS, T], 0 at s = t."""
    if mixer.takes_shared:
        raise ConfigError("it takes values of other layers.")
    directions = torch.randn(HEADS, x_NTD.shape[2], generator=generator_for(SEED, "directions")).to(x_NTD)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # PyTorch's fast attention cannot be derived twice
        x = x_NTD if x_NTD.requires_grad else x_NTD.detach().requires_grad_()
        y = mixer(x)[:, -1] @ directions.T
        slopes = [torch.autograd.grad(one, x, retain_graph=True, create_graph=differentiable)[0] for one in y.sum(0)]
        sizes = [slope[:, :-1].square().sum(2).clamp(min=torch.finfo(x.dtype).tiny).sqrt() for slope in slopes]
        return F.pad(torch.stack(sizes, dim=1), (0, 1))


def _shares(weights_NHT: Tensor) -> Tensor:
    sizes = weights_NHT.abs()
    return sizes / sizes.sum(-1, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)


def _put(x_NTD: Tensor, place: int, contents_ND: Tensor) -> Tensor:
    """Return the sequences with other contents at one place."""
    return torch.cat([x_NTD[:, :place], contents_ND[:, None], x_NTD[:, place + 1 :]], dim=1)
