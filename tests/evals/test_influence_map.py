"""Pictures of what layers read: known matrices, what is stored, which inputs there are."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from basecap.data.task_config import TaskSection
from basecap.data.task_data import TaskData
from basecap.errors import ConfigError, DataError
from basecap.evals import Context, build_evaluation
from basecap.evals.influence_map import _picture
from basecap.mixers import Mixer
from basecap.models.config import model_config
from basecap.models.language_model import LanguageModel
from basecap.ops import Influence
from basecap.records import RunRecords
from tests.evals._context import LENGTH

TASK = {"task": "mqar", "options": {"vocab": 64, "length": 32}}


def uniform(length: int) -> Influence:
    """Return two heads of opposite signs that read all of the past alike."""
    past = torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None]
    return Influence.of(torch.stack([past, -past])[None])


def test_a_picture_of_uniform_reading():
    sizes, largest, distance = _picture(uniform(40))
    assert sizes.dtype == np.float16 and sizes.shape == (40, 40)
    np.testing.assert_allclose(sizes, uniform(40).whole()[0, 0], rtol=1e-3)
    assert largest == 1 and distance == pytest.approx(np.mean(np.arange(40)) / 2)


def test_a_long_input_is_drawn_by_the_means_of_blocks():
    sizes, largest, distance = _picture(uniform(601))
    whole = uniform(601).whole()[0, 0].double().numpy()
    assert sizes.shape == (201, 201)
    assert sizes[100, 30] * largest == pytest.approx(whole[300:303, 90:93].mean(), rel=2e-3)
    assert sizes[200, 7] * largest == pytest.approx(whole[600, 21:24].mean(), rel=2e-3)
    assert largest == pytest.approx(whole[:3, :3].mean()) and distance == pytest.approx(150, rel=1e-4)


def test_a_layer_that_reads_nothing_has_an_empty_picture():
    sizes, largest, distance = _picture(Influence.of(torch.zeros(1, 2, 8, 8)))
    assert (sizes == 0).all() and largest == distance == 0


INPUTS = [
    ({}, "prose, held-out document 0", LENGTH),
    ({"length": 16, "number": 1}, "prose, held-out document 1", 16),
    ({"text": "a cat and a dog"}, "'a cat and a dog'", 15),
    (TASK, "mqar, length 32, pairs 4, example 0", 32),
]


def test_inputs(context, model, tmp_path):
    for options, words, tokens in INPUTS:
        evaluation = build_evaluation({"influence-map": options})
        evaluation.check(context.data, LENGTH)
        outcome = evaluation.run(model, context)
        (maps,) = outcome.maps
        assert (maps.input, maps.tokens) == (words, tokens) and (len(maps.keys) > 0) == ("task" in options)
        assert [(item.subset, item.metric, item.n) for item in outcome.measurements] == [
            ("layer 0", "distance", tokens)
        ]
        assert 0 < outcome.measurements[0].value < tokens / 2
    records = RunRecords(tmp_path / "run")
    records.write_maps("influence-map", 9, maps)
    records.write_maps("influence-map", 10, maps)
    stored = records.maps()["influence-map"]
    assert (stored.input, stored.tokens, stored.layers.tolist()) == (maps.input, 32, [0])
    assert stored.sizes.dtype == np.float16 and np.array_equal(stored.sizes, maps.sizes)
    assert stored.values.tolist() == [1, 3, 5, 7] and np.array_equal(stored.asked, maps.asked)
    records.rewind(9)
    assert records.maps() == {}
    for module in model.modules():
        if hasattr(module, "influence"):
            module.influence = lambda x_BTD: None
    nothing = build_evaluation("influence-map").run(model, context)
    assert nothing.measurements == [] and nothing.maps == ()


def test_what_cannot_be_drawn_is_refused(context):
    for options, error, message in (
        ({"number": 10_000}, DataError, "held-out documents; lower number"),
        ({"text": "a"}, DataError, "fewer than 2 tokens"),
        ({"task": "mqar"}, DataError, r"the options \{vocab: 237\}"),
        ({"length": 4096}, ConfigError, "length"),
        ({"text": "a cat", "task": "mqar"}, ConfigError, "cannot be combined"),
        ({"texts": "a cat"}, ConfigError, "text"),
        (
            {"inputs": [{"options": 5}]},
            ConfigError,
            "'options' of an input of influence-map cannot be 5",
        ),
        ({"inputs": [{"tasks": "mqar"}]}, ConfigError, r"'tasks' of an input of influence-map: did you mean 'task'\?$"),
        (
            {"inputs": [{**TASK, "number": -1}]},
            ConfigError,
            "option 'number' of an input of influence-map cannot be -1",
        ),
    ):
        with pytest.raises(error, match=message):
            build_evaluation({"influence-map": options}).check(context.data, LENGTH)


def test_a_study_of_tasks_reads_its_own_task_and_no_text():
    section = TaskSection(
        train=("mqar-last",), test=("mqar-last", "mqar"), options={"vocab": 64}, cells=({"length": 64, "pairs": 2},)
    )
    data = TaskData(section, "mqar-last")
    config = model_config("transformer++", hidden=16, vocab=data.vocabulary, layers=1, max_length=64)
    context = Context(data=data, device=torch.device("cpu"), autocast=contextlib.nullcontext)
    inputs = [{}, {"task": "mqar", "options": {"length": 32}}]  # a task of the study has its options and largest cell
    evaluation = build_evaluation({"influence-map": {"inputs": inputs}})
    outcome = evaluation.run(LanguageModel(config).initialise(0), context)
    words = ["mqar-last, length 64, pairs 2, example 0", "mqar, length 32, pairs 2, example 0"]
    assert [maps.input for maps in outcome.maps] == words
    assert [item.subset for item in outcome.measurements] == [f"layer 0, {each}" for each in words]
    asked = outcome.maps[0].asked
    assert len(asked) == 2 and set(asked[:, 1]) == set(outcome.maps[0].values)
    with pytest.raises(DataError, match="no tokenizer"):
        build_evaluation({"influence-map": {"text": "a cat"}}).check(data, 64)


def test_processes_share_the_layers(context, model):
    """Of one input as of several; a process without a layer, or with layers without `influence`, adds nothing."""
    deep = LanguageModel(model.config.model_copy(update={"depth": 3})).initialise(0)
    without = next(module for module in deep.modules() if isinstance(module, Mixer) and module.layer.index == 2)
    without.influence = lambda x_BTD: None
    for options in ({}, {"inputs": [{}, TASK]}):
        evaluation = build_evaluation({"influence-map": options})
        alone = evaluation.run(deep, context)
        parts = [evaluation.run(deep, replace(context, rank=rank, world=4)) for rank in range(4)]
        assert [[maps.layers.tolist() for maps in part.maps] for part in parts] == [
            [],
            *([[layer]] * len(alone.maps) for layer in (0, 1)),
            [],
        ]
        joined = evaluation.join(parts)
        assert joined.measurements == alone.measurements and len(alone.measurements) == 2 * len(alone.maps)
        for found, expected in zip(joined.maps, alone.maps, strict=True):
            for name in ("input", "tokens", "layers", "largest", "sizes", "keys", "values", "asked"):
                np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
