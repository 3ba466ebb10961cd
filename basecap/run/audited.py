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
#: Most tokens of a sequence.
LONGEST = 4096


def audit_run(run: Path, length: int = LENGTH, device: str | None = None) -> list[Audit]:
    """Return the audit of each mixer layer of the model in `run`, in order.

    Its sequences are those of the study's test split of its first training domain, cut after `length` tokens or after
    the training length, or the test examples of its task.

    Raises:
        ConfigError, CheckpointError: as `load_trained`; ConfigError where a layer cannot be audited.
        DataError: the test split is too short.
    """
    trained = load_trained(run, device=device)
    network, found = trained.network, dict[int, tuple[Mixer, Tensor]]()
    ids = _held_out(run, trained)
    size = min(length, network.config.max_length, len(ids) // (2 * SEQUENCES))
    if size < SHORTEST:
        raise DataError(f"the test split has {len(ids)} tokens, an audit needs {2 * SEQUENCES * SHORTEST}; add text.")

    def keep(mixer: Mixer, given: tuple[Tensor, ...]) -> None:
        found[mixer.layer.index] = mixer, given[0]

    handles = [module.register_forward_pre_hook(keep) for module in network.modules() if isinstance(module, Mixer)]
    rows = torch.from_numpy(ids[: 2 * SEQUENCES * size].reshape(-1, size))
    with torch.no_grad():
        network.hidden(rows.to(network.embedding.weight.device))
    for handle in handles:
        handle.remove()
    return [audit(mixer, x, f"layer {index}, {type(mixer).__name__}") for index, (mixer, x) in sorted(found.items())]


def _held_out(run: Path, trained: TrainedModel) -> NDArray[np.int64]:
    """Return tokens of the test split in order, of as many documents as LONGEST needs."""
    info, out = info_of(run), RunRecords(run).study
    study = validate(StudyRecords(out).study(), str(out / "study.yaml"))
    if study.task is not None and info.task is not None:
        data = TaskData(study.task, info.task)
        return data.held_out("test", data.cells[-1]).inputs.reshape(-1).astype(np.int64)
    text = recorded_data(study, out)
    documents = text.documents("test", text.train_domains[0])
    count = int(np.searchsorted(documents.sizes.cumsum(), 2 * SEQUENCES * LONGEST)) + 1
    whole = [documents.tokens(index) for index in range(min(count, len(documents)))]
    if info.imported:  # its tokens may be others
        whole = [trained.tokens(text.tokenizer.decode(one.tolist()))[0].cpu().numpy() for one in whole]
    return np.concatenate(whole).astype(np.int64)
