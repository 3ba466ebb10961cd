"""Evaluations are split among processes: those of basecap, and the example of the documentation."""

import re
from dataclasses import replace
from pathlib import Path

from basecap.evals import EVALUATIONS, SharedEvaluation, build_evaluation
from basecap.registry import load_plugin
from tests.evals.test_domain_loss import context, model, prepared  # noqa: F401 (fixtures)

PAGE = Path(__file__).parents[2] / "docs/studies.md"


def test_every_evaluation_of_basecap_is_split():
    own = [EVALUATIONS.get(name) for name in EVALUATIONS.names()]
    own = [cls for cls in own if cls.__module__.startswith("basecap.evals.")]
    assert len(own) >= 7 and all(issubclass(cls, SharedEvaluation) for cls in own)


def test_the_example_of_the_documentation_is_split(context, model, tmp_path):  # noqa: F811
    (code,) = re.findall(r"```python\n(# next_token\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    plugin = tmp_path / "next_token.py"
    plugin.write_text(code)
    load_plugin(plugin)
    evaluation = build_evaluation("next-token")
    alone = evaluation.run(model, context)
    assert [found.subset for found in alone.measurements] == ["prose", "code"]
    assert all(0 <= found.value < 1 and found.n > 100 for found in alone.measurements)
    parts = [evaluation.run(model, replace(context, rank=rank, world=2)) for rank in (0, 1)]
    assert [len(part.measurements) for part in parts] == [1, 1]
    assert evaluation.join(parts).measurements == alone.measurements
