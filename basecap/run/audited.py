"""The audit of each mixer layer of a trained model, on held-out tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from basecap.data.task_data import TaskData
from basecap.evals.audit import held_out
from basecap.models.audit import LENGTH, audit, layer_inputs
from basecap.plan.workloads import recorded_data
from basecap.records import RunRecords, StudyRecords
from basecap.records.audits import Audit
from basecap.run.trained import TrainedModel, info_of, load_trained
from basecap.study.config import validate


def audit_run(run: Path, length: int = LENGTH, device: str | None = None) -> list[Audit]:
    """Return the audit of each mixer layer of the model in `run`, in order.

    Its sequences are those of the study's test split of its first training domain, cut after `length` tokens or after
    the training length, or examples of its task in the largest cell.

    Raises:
        ConfigError, CheckpointError: as `load_trained`; ConfigError where a layer cannot be audited.
        DataError: the test split is too short.
    """
    trained = load_trained(run, device=device)
    network = trained.network
    rows = torch.from_numpy(_rows(run, trained, min(length, network.config.max_length)))
    found = layer_inputs(network, rows.to(network.embedding.weight.device))
    audits = (audit(mixer, x, f"layer {index}, {type(mixer).__name__}") for index, (mixer, x) in found.items())
    return [replace(one, trained=True) for one in audits]


def _rows(run: Path, trained: TrainedModel, length: int) -> NDArray[np.int64]:
    """Return sequences of at most `length` tokens, [2 * SEQUENCES, T]; raises DataError as `audit_run` does."""
    info, out = info_of(run), RunRecords(run).study
    study = validate(StudyRecords(out).study(), str(out / "study.yaml"))
    if study.task is not None and info.task is not None:
        return held_out(TaskData(study.task, info.task), length)
    text = recorded_data(study, out)

    def own(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return trained.tokens(text.tokenizer.decode(tokens.tolist()))[0].cpu().numpy()

    return held_out(text, length, own if info.imported else None)
