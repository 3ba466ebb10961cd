"""Selectivity: layers whose answer is known, the intervals, and what is refused."""

import contextlib
import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from basecap.data.workload import Batch, Workload
from basecap.errors import ConfigError, DataError
from basecap.evals import Context, build_evaluation
from basecap.evals._signed import LAGS, ratio, signed_reads, signed_score
from basecap.evals.selectivity import PairMasks, exchanged, measure, reads_of
from basecap.mixers import Mixer
from basecap.models.config import LayerConfig, model_config
from basecap.models.language_model import LanguageModel
from basecap.ops import Influence
from basecap.tasks import NOTHING, Role, build_task

OPTIONS = {"vocab": 16, "length": 32, "pairs": 4}
VOCABULARY, WIDTH = 36, 64


@dataclass
class Tokens(Workload):
    """A workload of which an evaluation sees no more than its sizes."""

    vocabulary: int = VOCABULARY
    length: int = 32
    manifest_hash: str = ""

    def batch(self, seed: int, step: int, batch: int, rank: int = 0, world: int = 1) -> Batch:
        raise AssertionError("an evaluation does not train")


CONTEXT = Context(data=Tokens(), device=torch.device("cpu"), autocast=contextlib.nullcontext)


def built(*uses: str) -> LanguageModel:
    """Return a model of one head and a layer of each kind."""
    pattern = tuple(LayerConfig(use=use) for use in uses)
    config = model_config(uses[0], hidden=WIDTH, vocab=VOCABULARY, layers=len(uses), pattern=pattern, max_length=32)
    return LanguageModel(config).initialise(0)


def looking_for_equal_tokens(sharpness: float) -> LanguageModel:
    """Return softmax attention in which a token attends to equal ones: a query reads its key, and itself."""
    model = built("transformer++ no position")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("qkv.weight"):
                parameter.copy_(torch.cat([sharpness * torch.eye(WIDTH), torch.eye(WIDTH), torch.eye(WIDTH)]))
            elif parameter.shape == (VOCABULARY, WIDTH):
                parameter.copy_(torch.eye(VOCABULARY, WIDTH))
    return model


def numbers(model: LanguageModel, **options) -> dict[tuple[str, str], float]:
    evaluation = build_evaluation({"selectivity": {"options": OPTIONS, "examples": 40, **options}})
    evaluation.check(CONTEXT.data, 32)
    found = evaluation.run(model.eval(), CONTEXT).measurements
    assert all(item.n == 40 and (item.metric == "lag" or item.stderr >= 0) for item in found)
    return {(item.subset, item.metric): item.value for item in found}


def test_attention_that_looks_for_equal_tokens_reads_the_own_key_and_no_value():
    found = numbers(looking_for_equal_tokens(5.0))
    assert found["layer 0", "key_mass"] == pytest.approx(0.5, abs=0.01)
    assert found["layer 0", "key_score"] > 0.999
    assert abs(found["layer 0", "score"]) < 0.2 and found["layer 0", "mass"] < 1e-6


def test_uniform_attention_reads_all_pairs_alike():
    found = numbers(looking_for_equal_tokens(0.0))
    assert found["layer 0", "mass"] == pytest.approx(found["layer 0", "null"], rel=1e-5)
    assert found["layer 0", "score"] == pytest.approx(0, abs=1e-5)
    assert found["layer 0", "key_score"] == pytest.approx(0, abs=1e-5)


def test_an_untrained_model_scores_near_zero_and_layers_without_influence_are_left_out(monkeypatch):
    model = built("transformer++", "mamba-2", "rwkv-7")
    monkeypatch.setattr(next(m for m in model.modules() if getattr(m, "A_log", None) is not None), "influence", none)
    found = numbers(model)
    assert {layer for layer, metric in found if metric != "need"} == {"layer 0", "layer 2"}
    assert all(abs(value) < 0.3 for (_, metric), value in found.items() if metric.endswith("score"))


def none(x_BTD):
    """Return no influence, as a mixer without one does."""
    return


def test_batches_of_examples_make_no_difference():
    model, values = looking_for_equal_tokens(0.5), []
    for length in (2**24, 1):
        evaluation = build_evaluation({"selectivity": {"options": OPTIONS, "examples": 5}})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("basecap.evals.selectivity.FACTORS", length)
            values.append([item.value for item in evaluation.run(model, CONTEXT).measurements])
    assert values[0] == pytest.approx(values[1], rel=1e-5) and len(values[0]) == 9


@pytest.mark.parametrize("world", [2, 7])
def test_processes_share_the_examples_and_join_their_numbers(world: int):
    model = looking_for_equal_tokens(0.5)
    evaluation = build_evaluation({"selectivity": {"options": OPTIONS, "examples": 5}})
    parts = [evaluation.run(model, replace(CONTEXT, rank=rank, world=world)) for rank in range(world)]
    examples = [max((len(x) for x in part.samples.values()), default=0) for part in parts]
    assert sum(examples) == 5 and max(examples) == -(-5 // world)
    whole, joined = evaluation.run(model, CONTEXT), evaluation.join(parts)
    for one, other in zip(whole.measurements, joined.measurements, strict=True):
        assert (one.subset, one.metric, one.n) == (other.subset, other.metric, other.n)
        assert (one.value, one.stderr or 0) == pytest.approx((other.value, other.stderr or 0), rel=1e-4)


@pytest.mark.parametrize("name", ["mqar-shuffle", "mqar-k2v2", "zoology-mqar"])
def test_perfect_opposite_and_positional_layers_in_any_task(name: str):
    """A layer that reads the values of the asked pair alone scores 1, with a head that reads all alike less."""
    found = build_task(name, {"pairs": 3}).instances(0, range(6))
    wanted = {part: PairMasks(found, part) for part in (Role.VALUE, Role.KEY)}
    T = found.inputs.shape[1]
    asked = found.groups != NOTHING
    perfect, values = np.zeros((2, 6, T, T), np.float32), (found.roles == Role.VALUE)[:, None] & np.tri(T, dtype=bool)
    for reading, (row, t) in itertools.product(range(2), zip(*np.nonzero(asked), strict=True)):
        pair = (found.pairs[row, t] + reading) % 3
        perfect[reading, row, t] = -3.0 * (values[row, t] & (found.pairs[row] == pair))
    factors = torch.from_numpy(perfect.reshape(12, T, T))
    reads = reads_of(Influence.of(factors[:, None]).mean_size(), wanted)
    mass, null, score = measure("layer 0", "", reads[Role.VALUE])
    assert (mass.value, null.value, score.value) == (pytest.approx(1), 0, 1)
    assert [item.value for item in measure("layer 0", "key_", reads[Role.KEY])] == [0, 0, 0]
    uniform = torch.ones(T, T).tril().expand(12, -1, -1)
    mixed = reads_of(Influence.of(torch.stack([factors, uniform / 100], dim=1)).mean_size(), wanted)
    assert 0.5 < measure("layer 0", "", mixed[Role.VALUE])[2].value < 1
    others = torch.from_numpy(np.concatenate([values, values])) * (factors == 0)
    assert measure("layer 0", "", reads_of(others.float(), wanted)[Role.VALUE])[2].value == -1
    t = torch.arange(T)
    recent = torch.exp(-0.2 * (t[:, None] - t)).tril().expand(12, -1, -1)
    late = measure("layer 0", "", reads_of(recent, wanted)[Role.VALUE])
    assert late[2].value == pytest.approx(0, abs=1e-6) and late[0].value > 0


def test_signed_scores_find_a_pair_that_is_read_one_token_later_by_its_sign():
    """All pairs are read with factors of one size, one token after the value; only the queried pair's sign is fixed."""
    found, draws = build_task("mqar-shuffle", {"pairs": 3}).instances(0, range(40)), np.random.default_rng(0)
    masks = PairMasks(found, Role.VALUE)
    T, queries = found.inputs.shape[1], found.groups != NOTHING
    values = np.pad(found.roles == Role.VALUE, ((0, 0), (1, 0)))[:, :-1]
    pairs = np.where(values, np.pad(found.pairs, ((0, 0), (1, 0)))[:, :-1], NOTHING)
    factors = values[:, None] * np.tri(T) * draws.choice((-1.0, 1.0), (2, 2, 40, T, T))  # heads, readings, examples
    for reading in range(2):
        asked = np.where(queries, (found.pairs + reading) % 3, NOTHING - 1)
        own = (asked[:, :, None] == pairs[:, None]) & np.tri(T, dtype=bool)
        factors[:, reading] = np.where(own, np.array([1.0, -1.0])[:, None, None, None], factors[:, reading])
    influence = Influence.of(torch.from_numpy(factors.reshape(2, 80, T, T)).transpose(0, 1))
    sizes = influence.mean_size()
    reads = signed_reads(influence, sizes, masks.places, masks.first, masks.second)
    assert abs(measure("layer 0", "", reads_of(sizes, {Role.VALUE: masks})[Role.VALUE])[2].value) < 0.1
    assert reads.shape == (40, 2, 3, LAGS)
    parts, lag = signed_score(reads)
    score, error = ratio(parts)
    # the mass is 1, the null 0 on average, and the sum of both without signs 2, less where values come after a query
    assert lag == 1 and score == pytest.approx(0.5, abs=4 * error) and 0 < error < 0.05
    reads[:, :, :-1] *= draws.choice((-1.0, 1.0), reads[:, :, :-1].shape)
    noise, _ = signed_score(reads)
    assert ratio(noise)[0] == pytest.approx(0, abs=4 * ratio(noise)[1]) and signed_score(reads[:1]) is None


def test_queries_are_exchanged_and_nothing_else():
    found = build_task("mqar-k2v2", {"pairs": 3}).instances(0, range(4))
    first, second = np.split(exchanged(found), 2)
    assert np.array_equal(first, found.inputs)
    assert np.array_equal(first != second, (found.roles == Role.QUERY))
    for row in range(4):
        for pair in range(3):
            asking = second[row][(found.roles[row] == Role.QUERY) & (found.pairs[row] == pair)]
            key = first[row][(found.roles[row] == Role.KEY) & (found.pairs[row] == (pair + 1) % 3)]
            assert asking.tolist() == key.tolist()


def test_standard_error_of_a_score_is_that_of_resampled_examples():
    draws = np.random.default_rng(0)
    reads = draws.gamma(4, 0.02, (200, 2)) * [3, 1]
    scores = []
    for _ in range(2000):
        mass, null = reads[draws.integers(0, 200, 200)].mean(axis=0)
        scores.append((mass - null) / (mass + null))
    found = measure("layer 0", "", reads)[2]
    assert found.stderr == pytest.approx(np.std(scores), rel=0.1)
    assert found.value == pytest.approx(np.mean(scores), abs=found.stderr / 3)
    assert measure("layer 0", "", reads[:1])[0].stderr is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"options": {"vocab": 20}}, DataError, r"the options \{vocab: 16\}"),
        ({"options": {"vocab": 16, "length": 64}}, DataError, "but the models take at most 32"),
        ({"options": {**OPTIONS, "pairs": 1}}, DataError, "2 pairs or more"),
        ({"task": "induction-heads", "options": {"vocab": 16, "length": 32}}, DataError, "cannot be exchanged"),
        ({"task": "passkey"}, DataError, "choose another task"),
        ({"task": "mqarr"}, ConfigError, "mqar"),
        ({"options": {"pair": 3}}, ConfigError, "pairs"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        build_evaluation({"selectivity": options}).check(CONTEXT.data, 32)


def test_need_finds_only_the_layer_that_reads():
    """Of two layers, the second gives the token after the first one equal to the present: the value of the pair."""
    model = built("transformer++ no position", "transformer++ no position").eval()
    _, second = (module for module in model.modules() if isinstance(module, Mixer))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.eye(*parameter.shape) if parameter.shape == (VOCABULARY, WIDTH) else torch.zeros(()))
        for norm in (module for module in model.modules() if isinstance(module, torch.nn.RMSNorm)):
            norm.weight.fill_(1.0)

    def read(x_BTD, segments=None):
        like = torch.cosine_similarity(x_BTD[:, :, None], x_BTD[:, None], dim=-1) > 0.99
        before = torch.nn.functional.pad(like, (1, -1)).tril().float()
        return 20 * (before * (before.cumsum(-1) == 1)) @ x_BTD

    second.forward = read
    found = {key: value for key, value in numbers(model).items() if key[1] == "need"}
    assert found == {("layer 0", "need"): 0, ("layer 1", "need"): pytest.approx(1, abs=0.1)}
    # A layer that always reads the first value loses no more than that query, and gains it where that pair is hidden.
    second.forward = lambda x_BTD, segments=None: 20 * x_BTD[:, 1:2].expand_as(x_BTD)
    assert numbers(model)["layer 1", "need"] <= 1 / 3
