"""The audit of each mixer layer of a trained model, on held-out tokens."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from basecap.data.task_data import TaskData
from basecap.errors import DataError
from basecap.mixers import Mixer
from basecap.plan.workloads import recorded_data
from basecap.records import RunRecords, StudyRecords
from basecap.run.trained import TrainedModel, info_of, load_trained
from basecap.study.config import validate
from basecap.testing.audit import LENGTH, SEQUENCES, Audit, audit

#: Tokens below which sequences are too short to say how a layer reads.
SHORTEST = 16
#: Seed of the examples of a task; no study trains with it by default.
EXAMPLES = 2**31


def audit_run(run: Path, length: int = LENGTH, device: str | None = None) -> list[Audit]:
    """Return the audit of each mixer layer of the model in `run`, in order.

    Its sequences are those of the study's test split of its first training domain, cut after `length` tokens or after
    the training length, or examples of its task in the largest cell.

    Raises:
        ConfigError, CheckpointError: as `load_trained`; ConfigError where a layer cannot be audited.
        DataError: the test split is too short.
    """
    trained = load_trained(run, device=device)
    network, found = trained.network, dict[int, tuple[Mixer, Tensor]]()
    rows = torch.from_numpy(_held_out(run, trained, min(length, network.config.max_length)))

    def keep(mixer: Mixer, given: tuple[Tensor, ...]) -> None:
        found[mixer.layer.index] = mixer, given[0]

    handles = [module.register_forward_pre_hook(keep) for module in network.modules() if isinstance(module, Mixer)]
    with torch.no_grad():
        network.hidden(rows.to(network.embedding.weight.device))
    for handle in handles:
        handle.remove()
    return [audit(mixer, x, f"layer {index}, {type(mixer).__name__}") for index, (mixer, x) in sorted(found.items())]


def _held_out(run: Path, trained: TrainedModel, length: int) -> NDArray[np.int64]:
    """Return sequences of at most `length` tokens, [2 * SEQUENCES, T]; raises DataError as `audit_run` does."""
    info, out = info_of(run), RunRecords(run).study
    study = validate(StudyRecords(out).study(), str(out / "study.yaml"))
    if study.task is not None and info.task is not None:
        cell = max(TaskData(study.task, info.task).cells, key=lambda task: tuple(task.cell.values()))
        return cell.instances(EXAMPLES, range(2 * SEQUENCES)).inputs[:, :length]
    text = recorded_data(study, out)
    documents = text.documents("test", text.train_domains[0])
    wanted = 2 * SEQUENCES * length
    count = int(np.searchsorted(documents.sizes.cumsum(), wanted)) + 1
    parts = [documents.tokens(index) for index in range(min(count, len(documents)))]
    if info.imported:  # its tokens may be others
        parts = [trained.tokens(text.tokenizer.decode(part.tolist()))[0].cpu().numpy() for part in parts]
    tokens = np.concatenate(parts)[:wanted].astype(np.int64)
    size = len(tokens) // (2 * SEQUENCES)
    if size < SHORTEST:
        raise DataError(
            f"the test split of {text.train_domains[0]} has {len(tokens)} tokens, too few to audit a model; "
            f"an audit needs {2 * SEQUENCES * SHORTEST} or more."
        )
    return tokens[: 2 * SEQUENCES * size].reshape(-1, size)
