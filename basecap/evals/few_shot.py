"""Scores on downstream tasks, such as multiple choice and questions about a text, by lm-evaluation-harness."""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from basecap.data import PreparedData
from basecap.data.config import Count
from basecap.errors import ConfigError
from basecap.evals._contract import Context, EvaluationConfig, Outcome, SharedEvaluation, evaluation
from basecap.evals._few_shot.loading import refuse_unknown
from basecap.evals._few_shot.scoring import Scorer
from basecap.models.language_model import LanguageModel
from basecap.records.evaluation_points import At

NEEDS, REMEDY = "few-shot needs lm-evaluation-harness", "pip install 'basecap[eval]', or remove few-shot"

#: Documents of the tasks of Table 1 of arXiv 2505.18522 in lm-evaluation-harness 0.4.13; each has one prompt.
DOCUMENTS = {"swde": 1111, "squad_completion": 2984, "fda": 1102}

Shots = Annotated[Count, Field(ge=0, le=1000)]


@evaluation("few-shot", unit="score", better="neither")
class FewShot(SharedEvaluation[PreparedData]):
    """Scores on tasks of lm-evaluation-harness, with the study's own tokenizer and without fine-tuning.

    Each task has the metrics that it declares: accuracies and shares of right answers, where more is better, or
    perplexities, where less is. Each number says which, and describes the documents and prompts. A prompt that is
    longer than the training length loses its beginning; the metric "cut prompts" is the share of documents where that
    was so, and is absent where there was none.
    """

    class Config(EvaluationConfig):
        """Options of few-shot."""

        at: At = Field("end", description="evaluation points to run at: every, end, or a list of tokens")
        tasks: tuple[str, ...] = Field(min_length=1, description="names of tasks or groups, see `lm-eval ls tasks`")
        shots: Shots | dict[str, Shots] | None = Field(
            None, description="examples in each prompt, or such a number by task (default: what the task says, else 0)"
        )
        limit: Count | None = Field(None, ge=1, description="maximum number of documents per task (default: all)")
        path: str | None = Field(
            None, description="directory of task files (*.yaml) instead of those of lm-evaluation-harness"
        )
        tokens_per_batch: Count = Field(32_768, ge=1, le=2**30, description="padded tokens per forward pass")

    config: Config
    needs = "text"
    reduced_by = "limit of few-shot"
    _reading: Any = None

    def missing(self) -> Sequence[str]:
        """Say that lm-evaluation-harness is not installed."""
        return () if find_spec("lm_eval") else (f"{NEEDS}; {REMEDY}.",)

    def check_options(self) -> None:
        """Raise ConfigError for a task that lm-evaluation-harness, if installed, or `path` does not have."""
        if isinstance(self.config.shots, dict):
            for name in self.config.shots.keys() - {*self.config.tasks}:
                raise ConfigError(f"few-shot: shots names {name!r}, which is not among tasks; add it to them.")
        refuse_unknown(self.config.tasks, self.config.path)

    def refuse_missing(self) -> None:
        """Raise ConfigError without lm-evaluation-harness, DataError without the data of a task."""
        self.check_options()
        _ = self._tasks

    def check(self, data: PreparedData, length: int) -> None:
        """Raise DataError if the prompts or answers of a task do not fit models of `length` tokens."""
        self.refuse_missing()
        self._reading = self._tasks.check(data.tokenizer, length)

    def tokens_read(self, data: PreparedData, length: int) -> int | None:
        """Return about how many tokens prompts and answers have, before `check` as `most_tokens`."""
        return self.most_tokens(length) if self._reading is None else self._reading.tokens

    def most_tokens(self, length: int) -> int | None:
        """Return how many tokens tasks of known size read at most; None for others, as loading tasks takes long."""
        if self.config.path is not None or not DOCUMENTS.keys() >= {*self.config.tasks}:
            return None
        limit = self.config.limit
        counts = [DOCUMENTS[task] if limit is None else min(DOCUMENTS[task], limit) for task in self.config.tasks]
        return length * sum(counts)

    def run(self, model: LanguageModel, context: Context[PreparedData]) -> Outcome:
        """Return the scores on this process's share of each task's documents, with the values of the documents."""
        scorer = Scorer(model=model, context=context, tokens_per_batch=self.config.tokens_per_batch)
        samples = self._tasks.answers(scorer, context.data.tokenizer, model.config.max_length, context.share)
        if context.world > 1:  # a share of the documents has no score yet
            return Outcome(measurements=[], samples=samples)
        return Outcome(measurements=self._tasks.measurements(samples), samples=samples)

    def join(self, parts: Sequence[Outcome]) -> Outcome:
        """Compute the scores of the documents of all processes."""
        keys = dict.fromkeys(key for part in parts for key in part.samples)
        samples = {key: np.concatenate([part.samples[key] for part in parts if key in part.samples]) for key in keys}
        return Outcome(measurements=self._tasks.measurements(samples), samples=samples)

    def trial(self, model: LanguageModel, context: Context[PreparedData]) -> None:
        """Compute the log-probabilities of the largest batch, after `check`; of one of any tasks without it."""
        scorer = Scorer(model=model, context=context, tokens_per_batch=self.config.tokens_per_batch)
        scorer.trial(None if self._reading is None else self._reading.padded)

    @property
    def _tasks(self) -> Any:
        return _loaded(self.config.model_dump_json(include={"tasks", "shots", "limit", "path"}))


@cache
def _loaded(options: str) -> Any:
    """Return the tasks, which every evaluation of these options in this process shares: loading takes a minute."""
    config = FewShot.Config.model_validate_json(options)
    return _library().LibraryTasks(config.tasks, config.shots, config.limit, config.path)


def _library() -> ModuleType:
    """Return the module that asks lm-evaluation-harness, whose import takes seconds; ConfigError without it."""
    try:
        from basecap.evals._few_shot import library
    except ImportError as error:
        raise ConfigError(f"{NEEDS} ({error}); {REMEDY}.") from error
    return library
