"""A trained model of a study with its tokenizer: what `basecap.load` returns and `basecap generate` uses."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from basecap.errors import ConfigError, nearest
from basecap.records import RunInfo, RunRecords, StudyRecords
from basecap.records.branches import finished_branches
from basecap.study.config import validate

if TYPE_CHECKING:  # importing torch takes seconds: a wrong directory is refused at once
    import torch
    from torch import Tensor

    from basecap.data import Tokenizer
    from basecap.models.language_model import LanguageModel

#: Tokens of the prompts and continuations that a batch decodes, each as long as its longest.
TOKENS_AT_ONCE = 32_768
#: Most tokens of a continuation.
MOST_TOKENS = 2**20
#: Steps with weights that an error names, those nearest to a step without.
NEAREST = 4

logger = logging.getLogger("basecap.study")


@dataclass(frozen=True, eq=False, repr=False)
class TrainedModel:
    """The model of a run, with its tokenizer.

    Attributes:
        name: of the run.
        seed: of the run.
        step: the training step after which its weights were stored.
        network: the `torch.nn.Module`, in evaluation mode; `help(trained.network)` lists what it computes.
    """

    name: str
    seed: int
    step: int
    network: "LanguageModel"
    _tokenizer: "Tokenizer | None"

    @property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer, with `encode(text)` and `decode(ids)`; raises ConfigError for a model trained on a task."""
        if self._tokenizer is None:
            raise ConfigError(
                f"{self.name} was trained on a task, whose tokens are no text; take a run of a study of text."
            )
        return self._tokenizer

    def tokens(self, text: str) -> "Tensor":
        """Return the tokens of a document as the network reads it: int64 [1, 1 + tokens], the first is end-of-text.

        `trained.network.logits(trained.tokens(text))` are the logits of the token after each of them.

        Raises:
            ConfigError: the text is not UTF-8, or the model was trained on a task.
        """
        import torch

        ids = [self.tokenizer.end_of_text, *self._encoded(text)]
        return torch.tensor([ids], dtype=torch.int64, device=self._device)

    def losses(self, text: str) -> "Tensor":
        """Return the loss of each token of a document in nats, given those before it: float32 [tokens], no gradient.

        As in the evaluation `domain-loss`, a longer document is cut into windows of the training length, and the first
        token is predicted too. `losses.sum()` is minus the log-probability of the document.

        Raises:
            ConfigError: the text is empty or not UTF-8, or the model was trained on a task.
        """
        import torch

        from basecap.evals.domain_loss import windows_of

        tokens = self.tokens(text)
        if tokens.shape[1] == 1:
            raise ConfigError("the text is empty; give at least one character.")
        parts = windows_of(tokens[0, 1:].cpu().numpy(), self.network.config.max_length, self.tokenizer.end_of_text)
        rows = (torch.from_numpy(part).to(tokens) for part in parts)
        return torch.cat([self.network.token_losses(row[None, :-1], row[None, 1:])[0] for row in rows])

    def generate(
        self, prompt: str, tokens: int = 100, *, temperature: float = 0.8, top_k: int | None = None, seed: int = 0
    ) -> str:
        """Return a prompt and its continuation, as `basecap generate` prints it; see `generate_each`."""
        (found,) = self.generate_each([prompt], tokens, temperature=temperature, top_k=top_k, seed=seed)
        return prompt + found.text

    def generate_each(
        self,
        prompts: Sequence[str],
        tokens: int = 100,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        seed: int = 0,
        stops: Sequence[str] = (),
    ) -> "list[Continued]":
        """Return the continuation of each prompt, as if it were alone.

        Args:
            prompts: texts to continue, of any lengths; one that is given twice has two samples.
            tokens: number of tokens to add.
            temperature: of sampling; 0 takes the most probable token.
            top_k: sample among the k most probable tokens only.
            seed: of sampling.
            stops: texts that end a continuation and are left out.

        Raises:
            ConfigError: a prompt is not UTF-8, an argument is out of range, the model was trained on a task or reads
                no more tokens.
        """
        import torch

        from basecap.models.generate import by_length, generate_each, is_whole

        for given, what in ((prompts, "prompts"), (stops, "stops")):
            if isinstance(given, str):
                raise ConfigError(f"{what} is one text; give a list of texts.")
        for stop in stops:
            refuse_bytes(stop)
        if "" in stops:
            raise ConfigError("a text to stop at is empty; give at least one character.")
        if not is_whole(tokens) or not 1 <= tokens <= MOST_TOKENS:
            raise ConfigError(f"tokens is {tokens!r}; give a whole number from 1 to {MOST_TOKENS:,}.")
        ids = [self._encoded(prompt) or [self.tokenizer.end_of_text] for prompt in prompts]
        starts = [torch.tensor(one, dtype=torch.int64, device=self._device) for one in ids]
        sample = partial(generate_each, self.network, temperature=temperature, top_k=top_k, seed=seed)
        added = dict[int, list[int]]()
        for batch in by_length([len(one) + tokens for one in ids], TOKENS_AT_ONCE):
            ends = [partial(self._has, stops)] * len(batch) if stops else None
            added |= dict(zip(batch, sample([starts[index] for index in batch], tokens, ends=ends), strict=True))
        return [self._continued(prompt, added[index], stops) for index, prompt in enumerate(prompts)]

    def _has(self, stops: Sequence[str], ids: list[int]) -> bool:
        text = self.tokenizer.decode(ids)
        return any(stop in text for stop in stops)

    def _continued(self, prompt: str, ids: list[int], stops: Sequence[str]) -> "Continued":
        whole = text = self.tokenizer.continued(prompt, ids).removeprefix(prompt)
        for stop in stops:
            text = text.split(stop)[0]
        return Continued(prompt=prompt, text=text, tokens=len(ids), stopped=text != whole)

    def _encoded(self, text: str) -> list[int]:
        refuse_bytes(text)
        return self.tokenizer.encode(text)

    @property
    def _device(self) -> "torch.device":
        return self.network.embedding.weight.device

    def __repr__(self) -> str:
        count = f"{self.network.parameters_count():,} parameters"
        return f"TrainedModel({self.name}, seed {self.seed}, step {self.step:,}, {count}, {self._device})"


@dataclass(frozen=True, kw_only=True)
class Continued:
    """A prompt and what a model adds to it.

    Attributes:
        prompt: as given.
        text: what follows it, up to a text to stop at.
        tokens: how many were added, with those of the text that stopped it.
        stopped: whether such a text ended it.
    """

    prompt: str
    text: str
    tokens: int
    stopped: bool


def refuse_bytes(text: str) -> None:
    """Raise ConfigError when a text has characters that UTF-8 cannot write, as names of files may have."""
    if not isinstance(text, str):
        raise ConfigError(f"{text!r} is not text; give a str.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("what was given is not text in UTF-8; convert it.") from error


def info_of(run: Path) -> RunInfo:
    """Return the info of the run in a directory; raises ConfigError, with a run that is near, when it holds none."""
    info = RunRecords(run).info()
    if info is None:
        own = StudyRecords(run).runs()
        if own:
            raise ConfigError(f"{run} is a study; give one of its runs, such as {own[0].path}.")
        places = (run.parent.parent, run.parent)  # a name misspelt below runs, runs itself
        found = next((runs for runs in (StudyRecords(place).runs() for place in places) if runs), [])
        hint = nearest(str(run), [str(known.path) for known in found]) if found else "give DIR/runs/NAME-sSEED."
        raise ConfigError(f"{run} is not the directory of a run; {hint}")
    return info


def load_trained(run: Path, *, step: int | None = None, device: str | None = None) -> TrainedModel:
    """Return the model in `run` (DIR/runs/NAME-sSEED, or DIR/imported/NAME) with its tokenizer, finished or not.

    Logs a warning if its architecture failed checks before it trained: it may decode other than it trains.

    Args:
        run: directory of the run.
        step: the training step of stored weights; None: the last, of the last branch where the run has branches.
        device: "cpu", "cuda" or "cuda:N"; None: a GPU if there is one.

    Raises:
        ConfigError: `run` is not the directory of a run, its text or its plugin is another or missing, or it has no
            weights of that step.
        CheckpointError: the run has no readable checkpoint.
    """
    info = info_of(run)
    from basecap.analysis.runs import failed_checks
    from basecap.plan.workloads import recorded_data
    from basecap.run.provenance import refuse_other_plugins
    from basecap.study.recorded_plugins import refuse_absent_plugins
    from basecap.system import environment
    from basecap.train.checkpoint import load_stored, stored_config

    records = RunRecords(run)
    if info.imported:
        return _load_imported(records, info, environment.choose_device(device))
    refuse_other_plugins(records, stored_config(records.resume))
    out = records.study
    try:
        study = validate(StudyRecords(out).study(), str(out / "study.yaml"))
    except ConfigError:
        refuse_absent_plugins(StudyRecords(out))
        raise
    place = environment.choose_device(device)
    weights = stored_weights(records)
    chosen = max(weights) if step is None else step
    if chosen not in weights:
        near = sorted(sorted(weights, key=lambda known: abs(known - chosen))[:NEAREST])
        hint = "give one of" if len(near) == len(weights) else "the nearest are"
        raise ConfigError(f"{run} has no weights of step {chosen}; {hint} {', '.join(map(str, near))}.")
    network = load_stored(weights[chosen]).to(place)
    tokenizer = recorded_data(study, out).tokenizer if study.task is None else None
    if fault := failed_checks(StudyRecords(out)).get(info.series):
        logger.warning("%s %s.", info.series, fault)
    return TrainedModel(info.name, info.seed, chosen, network, tokenizer)


def _load_imported(records: RunRecords, info: RunInfo, place: "torch.device") -> TrainedModel:
    from basecap.data import Tokenizer
    from basecap.train.checkpoint import load_stored

    ((step, weights),) = stored_weights(records).items()
    network = load_stored(weights).to(place)
    return TrainedModel(info.name, info.seed, step, network, Tokenizer.load(records.tokenizer))


def stored_weights(run: RunRecords) -> dict[int, Path]:
    """Return the directories of the stored weights of a run by step, ascending, with the ends of its branches."""
    from basecap.train.checkpoint import stored

    found = {**stored(run.resume), **stored(run.weights)}
    for branch in finished_branches(run):
        found |= stored(branch.weights)
    return dict(sorted(found.items()))
