"""Inference speed: what is timed, and the numbers that follow from the times."""

import pytest

from basecap.errors import ConfigError
from basecap.evals import build_evaluation, inference_speed
from basecap.models.config import model_config
from basecap.models.decoding_speed import Times
from basecap.models.language_model import LanguageModel

TIMES = Times(first_token=2.0, token=0.5, first_token_python=3.0, token_python=1.0, notes="no graph")


def test_speeds_follow_from_the_times_of_a_load(context, model, monkeypatch):
    loads = []
    monkeypatch.setattr(inference_speed, "time_decoding", lambda used, load: loads.append(load) or TIMES)
    found = build_evaluation({"inference-speed": {"batch": 4, "prompt": 1000, "new": 41}}).run(model, context)
    speeds = {(item.subset, item.metric): item.value for item in found.measurements}
    assert speeds == {
        ("generation", "speed"): pytest.approx(4 * 41 / (2 + 40 * 0.5)),
        ("reading", "speed"): pytest.approx(4 * 1000 / 2),
        ("writing", "speed"): pytest.approx(4 / 0.5),
    }
    (data,) = {item.data for item in found.measurements}
    assert data.startswith("4 sequences of 1,000 + 41 tokens, float32, ") and data.endswith("; no graph")
    assert [(load.prompt, load.new, load.batch) for load in loads] == [(1000, 41, 4)]


def test_a_load_is_that_of_the_paper_at_its_length_and_runs_at_a_short_one(context, model):
    found = build_evaluation("inference-speed")
    load = found._load(102_400)
    assert (load.prompt, load.new, load.batch) == (51_200, 5120, 8)
    small = build_evaluation({"inference-speed": {"batch": 2, "rows": 1, "repeats": 1}})
    assert small.tokens_read(context.data, 48) == 2 * 2 * 2 * (24 + 32)
    small.trial(model, context)
    assert all(item.value > 0 for item in small.run(model, context).measurements)


def test_what_cannot_be_timed_is_refused(context):
    config = model_config("transformer++ absolute", hidden=16, vocab=257, layers=1, max_length=48)
    learned = LanguageModel(config).initialise(0)
    with pytest.raises(ConfigError, match="inference-speed: a sequence may have 56 tokens, and this model has param"):
        build_evaluation("inference-speed").trial(learned, context)
    with pytest.raises(ConfigError, match="3 prompts at once do not divide a batch of 8; choose a divisor"):
        build_evaluation({"inference-speed": {"rows": 3}}).tokens_read(context.data, 48)
