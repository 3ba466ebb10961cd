"""The context that evaluations are run in, and a model for each test."""

import pytest

from basecap.evals import Context
from basecap.models.language_model import LanguageModel
from tests.evals._context import make_context, make_model


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """Return a context that all tests share."""
    return make_context(tmp_path_factory.mktemp("context"))


@pytest.fixture
def model(context: Context) -> LanguageModel:
    return make_model(context)
