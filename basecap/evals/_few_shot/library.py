"""The tasks of lm-evaluation-harness (the extra `eval`): their prompts, metrics and groups, asked of our models."""

import contextlib
import functools
import hashlib
import io
import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lm_eval
import numpy as np
from lm_eval.api.group import Group
from lm_eval.api.registry import get_aggregation
from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from basecap.data.tokenizer import Tokenizer
from basecap.errors import ConfigError, DataError
from basecap.evals._contract import Measurement
from basecap.evals._few_shot.library_model import REMEDY, AskedModel
from basecap.evals._few_shot.loading import directory_of, named, probing, unknown
from basecap.evals._few_shot.scoring import Scorer
from basecap.evals._statistics import standard_error
from basecap.records.measured import Better

logger = logging.getLogger("basecap.evals")

#: Seed of the draws of examples that a prompt shows, that of lm-evaluation-harness.
SEED = 1234

#: Documents of each task whose prompts are looked at before training.
LOOKED_AT = 100

#: Most groups of documents of the jackknife, which computes a metric once without each of them.
GROUPS = 200

#: Aggregations that are means, whose standard error has a closed form.
MEANS = (np.mean, get_aggregation("mean"))

#: The metric of prompts whose beginning was left out, beside those of the task.
CUT = "cut prompts"

#: The key of what a task asks, beside those of its metrics.
QUESTIONS = "questions"

#: The values of each document, by task and metric ("METRIC,FILTER" of lm-evaluation-harness, or `CUT`), and one
#: `Questions` of each process by task and `QUESTIONS`.
Samples = Mapping[tuple[str, Any], np.ndarray]

#: Unit and direction of a metric.
Kind = tuple[str, Better]


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What a task asks: its data set, how many documents, the examples in a prompt, a hash of documents and prompts."""

    source: str
    documents: int
    shots: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class TokensRead:
    """How much models read, estimated: tokens of all tasks; and padded ones of one task, if all its documents are long.

    The second is of the task with most of them: a batch is of one task.
    """

    tokens: int
    padded: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a study asks for: a task, or a group of tasks that has a score of its own."""

    name: str
    tasks: Sequence[str]
    group: Group | None


class LibraryTasks:
    """The tasks that a study names, with their data."""

    def __init__(
        self, names: Sequence[str], shots: int | Mapping[str, int] | None, limit: int | None, path: str | None
    ):
        """Load the tasks and their data.

        Args:
            names: of tasks, groups or tags.
            shots: examples in a prompt: of all tasks, or by name; the task's own number where not given.
            limit: documents of each task, all when None.
            path: directory of task files, which replace those of lm-evaluation-harness.

        Raises:
            ConfigError: a name is unknown, a task appears twice or is not one of text alone.
            DataError: the data of a task cannot be loaded.
        """
        self._limit = limit
        self.asked: list[Asked] = []
        self.tasks: dict[str, Task] = {}
        for name in names:
            tasks, group = _load(name, path)
            own = shots.get(name) if isinstance(shots, Mapping) else shots
            for task in tasks.values():
                _set_shots(task, own)
                _refuse_shots(task)
            for task in tasks.keys() & self.tasks.keys():
                raise ConfigError(f"few-shot: task {task!r} is in two of the tasks; remove one.")
            self.tasks |= tasks
            if group is not None and group.has_aggregation:
                self.asked.append(Asked(name=name, tasks=[*tasks], group=group))
            else:
                self.asked += [Asked(name=task, tasks=[task], group=None) for task in tasks]

    def check(self, tokenizer: Tokenizer, length: int) -> TokensRead:
        """Raise DataError when a task has answers that do not fit, or most of its prompts must be cut; log any cut.

        Returns:
            What models of `length` tokens read, from the first documents of each task.
        """
        tokens, padded = 0.0, 0
        for name, task in self.tasks.items():
            model = AskedModel(tokenizer, length)
            self._ask(name, model, min(LOOKED_AT, self._limit or LOOKED_AT))
            task.instances.clear()  # they hold all prompts
            tokens += model.read * self._documents(task) / len(model.cut)
            padded = max(padded, max(model.padded.values(), default=0) * self._documents(task))
            prompts = [one for found in model.cut.values() for one in found]
            found = (
                f"few-shot: task {name!r}: {sum(prompts)} of the first {len(prompts)} prompts do not fit the {length} "
                "tokens"
            )
            if 2 * sum(prompts) > len(prompts):
                raise DataError(f"{found} that models read; {REMEDY}.")
            if any(prompts):
                logger.warning("%s that models read, and lose their beginning.", found)
        return TokensRead(tokens=round(tokens), padded=padded)

    def answers(self, scorer: Scorer, tokenizer: Tokenizer, length: int, share: Callable[[int], range]) -> Samples:
        """Ask the model and return the values of each document.

        Args:
            scorer: the model.
            tokenizer: of the model.
            length: tokens that the model reads at most.
            share: returns which of a number of documents this process asks for.
        """
        samples = dict[tuple[str, Any], np.ndarray]()
        for name, task in self.tasks.items():
            # Every process makes all prompts, whose examples are drawn one after the other.
            own = share(self._documents(task))
            model = AskedModel(tokenizer, length, scorer, own)
            found = self._ask(name, model, self._limit)
            samples[name, QUESTIONS] = _objects([_questions(task)])
            samples[name, CUT] = np.array([any(model.cut[document]) for document in own], dtype=bool)
            values: dict[str, list[Any]] = defaultdict(list)
            for document in found:
                for metric in document["metrics"] if document["doc_id"] in own else ():
                    values[f"{metric},{document['filter']}"].append(document[metric])
            samples |= {(name, metric): _objects(items) for metric, items in values.items()}
            task.instances.clear()
        return samples

    def measurements(self, samples: Samples) -> list[Measurement]:
        """Return the scores of all documents, with their standard errors, and the share of prompts that were cut."""
        results, counts, questions, kinds = {}, {}, {}, {}
        for name, task in self.tasks.items():
            values = {metric: found.tolist() for (owner, metric), found in samples.items() if owner == name}
            counts[name], questions[name] = values.pop(CUT), values.pop(QUESTIONS)[0]
            results[name] = _scores(task, values)
            kinds[name] = {key: _kind(task, key, items) for key, items in values.items()}
        found = []
        for asked in self.asked:
            scores = results[asked.name] if asked.group is None else asked.group.aggregate(results)
            data = _described([questions[task] for task in asked.tasks])
            found += _measure(asked.name, scores, kinds[asked.tasks[0]], data)
            cut = [one for task in asked.tasks for one in counts[task]]
            if any(cut):
                share, n = float(np.mean(cut)), len(cut)
                found.append(
                    Measurement(
                        subset=asked.name, metric=CUT, value=share, n=n, unit="share", better="lower", data=data
                    )
                )
        return found

    def _documents(self, task: Task) -> int:
        return min(len(task.eval_docs), self._limit or len(task.eval_docs))

    def _ask(self, name: str, model: AskedModel, limit: int | None) -> list[dict[str, Any]]:
        """Ask about the first `limit` documents, in prompts that are always the same; return what is known of each."""
        task = self.tasks[name]
        task.set_fewshot_seed(SEED)
        with named(name), _quiet():
            found = lm_eval.evaluate(model, {"tasks": {name: task}, "groups": {}}, limit=limit, bootstrap_iters=0)
        return found["samples"][name]


def _load(name: str, path: str | None) -> tuple[dict[str, Task], Group | None]:
    """Return the tasks called `name` and, if it is a group, the group."""
    manager = _manager(path)
    if name not in manager.all_tasks:
        raise unknown(name, manager.all_tasks, path)
    with named(name), _quiet(), probing():
        found = manager.load([name])
    for task in found["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise ConfigError(f"few-shot: task {name!r} runs code of the model or shows pictures; leave it out.")
    return dict(found["tasks"]), found.get("groups", {}).get(name)


@functools.cache
def _manager(path: str | None) -> TaskManager:
    """Return the index of the tasks in a directory, or of those of lm-evaluation-harness, which takes seconds."""
    return TaskManager() if path is None else TaskManager(include_path=directory_of(path), include_defaults=False)


def _set_shots(task: Task, shots: int | None) -> None:
    """Set the examples of a prompt, unless the task takes no examples, as lm-evaluation-harness does."""
    held = task.get_config("num_fewshot")
    if shots is not None and held != 0:
        task.set_config(key="num_fewshot", value=shots)
    elif held is None:
        task.set_config(key="num_fewshot", value=0)


def _refuse_shots(task: Task) -> None:
    """Raise DataError when a task has fewer examples than a prompt should show, beside the document it asks about."""
    shots, sampler = task.config.num_fewshot or 0, getattr(task, "sampler", None)
    if not shots or not isinstance(sampler, ContextSampler):
        return
    chosen = sampler.fewshot_indices if type(sampler) is ContextSampler else None
    asked_too = task.fewshot_cfg.split is not None and task.fewshot_cfg.split == task.config.test_split
    examples = len(chosen or sampler.df or []) - asked_too
    if shots > examples:
        raise DataError(
            f"few-shot: task {task.config.task!r} has {examples} examples, fewer than its {shots} shots; lower shots."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's progress bars from the terminal."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _questions(task: Task) -> Questions:
    """Describe what a task asked; the hash covers documents, with their right answers, prompts and options."""
    config, digest, documents = task.config, hashlib.sha256(), set[int]()
    for request in task.instances:
        document = [] if request.doc_id in documents else [request.doc]
        documents.add(request.doc_id)
        digest.update(json.dumps([request.request_type, request.args, *document], default=str).encode())
    options = config.dataset_kwargs or {}
    source = "/".join(filter(None, [config.dataset_path or "its own code", config.dataset_name]))
    source += f"@{options['revision']}" if "revision" in options else ""
    return Questions(
        source=source + (f" {options['data_files']}" if "data_files" in options else ""),
        documents=len(documents),
        shots=config.num_fewshot or 0,
        digest=digest.hexdigest()[:16],
    )


def _described(asked: Sequence[Questions]) -> str:
    """Return a line on what was asked by one task, or by those of a group."""
    sources, shots = sorted({one.source for one in asked}), sorted({one.shots for one in asked})
    digest = asked[0].digest
    if len(asked) > 1:
        digest = hashlib.sha256(" ".join(one.digest for one in asked).encode()).hexdigest()[:16]
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return (
        f"{sources[0]}{more}, {sum(one.documents for one in asked):,} documents, "
        f"{' or '.join(map(str, shots))}-shot, SHA-256 {digest}, lm_eval {lm_eval.__version__}"
    )


def _kind(task: Task, key: str, values: Sequence[Any]) -> Kind:
    """Return unit and direction of a metric; a mean of numbers from 0 to 1 is a share."""
    metric, _, _ = key.partition(",")
    rises = task.higher_is_better().get(metric)
    better: Better = "neither" if rises is None else "higher" if rises else "lower"
    if metric.endswith("perplexity"):
        return "perplexity", better
    if metric == "bits_per_byte":
        return "bits per byte", better
    return "share" if all(isinstance(one, int | float) and 0 <= one <= 1 for one in values) else "score", better


def _objects(values: Sequence[Any]) -> np.ndarray:
    """Return an array whose entries are the values: numbers, or what a task's aggregation takes."""
    found = np.empty(len(values), dtype=object)
    found[:] = [value.item() if isinstance(value, np.generic) else value for value in values]
    return found


def _scores(task: Task, values: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return the scores of a task as lm-evaluation-harness keeps them, from which groups compute theirs."""
    scores: dict[str, Any] = {"sample_len": max(map(len, values.values()), default=0)}
    for key, items in values.items():
        metric, _, kept = key.partition(",")
        aggregate = task.aggregation().get(metric, np.mean)
        scores[key] = aggregate(items)
        error = _stderr(items, aggregate)
        scores[f"{metric}_stderr,{kept}"] = "N/A" if error is None else error
    return scores


def _stderr(items: Sequence[Any], aggregate: Callable[[Any], float]) -> float | None:
    """Return the standard error over documents: of a mean in closed form, else by the jackknife over groups of them."""
    if len(items) < 2 or aggregate in MEANS:
        return standard_error(np.array(items))
    groups = min(len(items), GROUPS)
    without = [aggregate([item for at, item in enumerate(items) if at % groups != left]) for left in range(groups)]
    return float(np.std(without)) * math.sqrt(groups - 1)


def _measure(name: str, scores: Mapping[str, Any], kinds: Mapping[str, Kind], data: str) -> list[Measurement]:
    """Return the numbers of a task or group whose metrics are of these kinds, measured on the `data` described."""
    found = []
    for key, value in scores.items():
        metric, _, kept = key.partition(",")
        if not kept or metric.endswith("_stderr"):
            continue
        error = scores.get(f"{metric}_stderr,{kept}", "N/A")
        unit, better = kinds.get(key, (None, None))
        found.append(
            Measurement(
                subset=name,
                metric=metric if kept == "none" else f"{metric} {kept}",
                value=float(value),
                n=scores["sample_len"],
                stderr=None if error == "N/A" else float(error),
                unit=unit,
                better=better,
                data=data,
            )
        )
    return found
