"""What the runs of a study train on: prepared text, or tasks, which need no preparation."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from basecap.data import PreparedData, bigram_loss, check_inputs, check_vocabulary, prepare
from basecap.data.config import DataConfig
from basecap.data.task_config import TaskSection
from basecap.data.task_data import TaskData
from basecap.data.workload import Workload
from basecap.errors import ConfigError
from basecap.records import StudyRecords
from basecap.study.config import StudyConfig

#: What runs train on by their training task, None in a study of text.
Workloads = Mapping[str | None, Workload]


class Material(ABC):
    """What the runs of one study train on and are tested on; opened once, by the first use of `workloads`."""

    @abstractmethod
    def refuse_missing(self) -> None:
        """Raise ConfigError, DataError when something is missing, before anything is prepared."""

    @abstractmethod
    def workloads(self) -> Workloads:
        """Return what runs train on, preparing what is missing.

        Raises:
            ConfigError: the directory was started with something else, or a vocabulary does not fit.
            DataError: it cannot be prepared.
        """

    @abstractmethod
    def environment_entries(self) -> dict[str, Any]:
        """Return its entries of environment.json."""


class Text(Material):
    """Token shards."""

    def __init__(self, section: DataConfig, vocab: int | None, out: Path):
        """Take the section `data`, the models' vocabulary where the study sets it, and the directory."""
        self._section = section
        self._vocab = vocab
        self._out = out

    def refuse_missing(self) -> None:
        """Look for the text and the tokenizer."""
        check_inputs(self._section, cache_of(self._section, self._out))

    def workloads(self) -> Workloads:
        """Return the prepared text, for all runs."""
        return {None: self.data}

    @cached_property
    def data(self) -> PreparedData:
        """The prepared text; raises as `workloads` does."""
        data = prepare(self._section, cache_of(self._section, self._out))
        if self._vocab is not None:
            check_vocabulary(self._vocab, data.tokenizer)
        held = StudyRecords(self._out).environment().get("data")
        if held not in (None, data.manifest_hash):
            raise ConfigError(
                f"{self._out} was started with other data (manifest {held}, now {data.manifest_hash}); restore the "
                "text, or run into another --out."
            )
        return data

    def environment_entries(self) -> dict[str, Any]:
        """Return the manifest's hash, a bigram model's loss, and what is known of the text."""
        return {
            "data": self.data.manifest_hash,
            "bigram_loss": bigram_loss(self.data, self._section.seq_len),
            "overlap": self.data.overlap_rows(),
            "text_note": self.data.remark,
        }


class Tasks(Material):
    """Examples that are made as they are needed; the hash of each run covers them."""

    def __init__(self, section: TaskSection):
        """Take the section `task`."""
        self._section = section

    def refuse_missing(self) -> None:
        """Nothing can be missing."""

    def workloads(self) -> Workloads:
        """Return the examples of each training task."""
        return self._workloads

    @cached_property
    def _workloads(self) -> Workloads:
        return {name: TaskData(self._section, name) for name in self._section.train}

    def environment_entries(self) -> dict[str, Any]:
        """Return nothing, as study.yaml has it all."""
        return {}


def material_of(study: StudyConfig, out: Path) -> Material:
    """Return what the study in `out` trains on; touches no file."""
    return Text(study.text, study.model.vocab, out) if study.task is None else Tasks(study.task)


def vocabulary_of(workloads: Workloads) -> int:
    """Return the number of token ids."""
    return max(workload.vocabulary for workload in workloads.values())


def data_of(study: StudyConfig, out: Path) -> PreparedData:
    """Return the prepared text of the study in `out`, preparing what is missing; ConfigError for a study of tasks."""
    return prepare(study.text, cache_of(study.text, out))


def recorded_data(study: StudyConfig, out: Path) -> PreparedData:
    """Return the text that the study in `out` was run with; ConfigError when it has changed or is none."""
    return Text(study.text, study.model.vocab, out).data


def data_with(study: StudyConfig, out: Path, tokenizer: Path) -> PreparedData:
    """Return the text of the study in `out` in tokens of another tokenizer, a file; raises as `data_of` does."""
    return prepare(study.text.model_copy(update={"tokenizer": str(tokenizer)}), cache_of(study.text, out))


def cache_of(section: DataConfig, out: Path) -> Path:
    """Return the directory of the prepared text of the section `data` of the study in `out`."""
    return Path(section.cache) if section.cache else out / "data"
