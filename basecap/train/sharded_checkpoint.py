"""Checkpoints of a sharded model: each process writes its part, beside the training, through PyTorch's own DCP.

resume/step-<n>/shard-<process>-model-00001-of-00001.safetensors    parts of the tensors, with their places
                state.json, SHA256SUMS                              as in other checkpoints

The tensors are called "model/<parameter>", "optimiser/<parameter>/<name>" and "average/<parameter>". Any number of
processes reads them, sharded or not. There is no pickle.
"""

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from basecap.errors import CheckpointError, describe_error
from basecap.train.distributed import Processes

#: How the files of parts begin.
SHARD = "shard-"


def has_shards(path: Path) -> bool:
    """Whether a checkpoint consists of parts."""
    return any(path.glob(f"{SHARD}*.safetensors"))


def shapes_of(path: Path, part: str) -> dict[str, torch.Size]:
    """Return the shape of each tensor of a part, such as "model", by its name."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader  # a second, which few runs need
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    tensors = {name.partition("/"): entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
    return {name: entry.size for (own, _, name), entry in tensors.items() if own == part}


def load_shards(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, whole or sharded, by their names; processes do not communicate.

    Raises CheckpointError when that fails.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as read

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that this process reads alone, as it means to
            read({**tensors}, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    except Exception as error:  # safetensors, DCP and the system have one each
        raise CheckpointError(
            f"checkpoint {path} is unreadable ({describe_error(error)}); remove {path.parent.parent} to train it again."
        ) from error


class ShardWriter:
    """Writes the parts of one checkpoint at a time while training goes on."""

    def __init__(self, group: Processes, channel: ProcessGroup):
        """Take the processes, which call every method together, and a group on CPUs that nothing else uses."""
        self._group, self._channel = group, channel
        self._pool = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None

    def write(self, directory: Path, tensors: Mapping[str, Tensor], finish: Callable[[], None]) -> None:
        """Copy tensors, then write them into a new directory; returns once they are copied.

        Args:
            directory: made by the leading process before.
            tensors: sharded ones, and others that are the same in all processes.
            finish: called in the leading process when all have written.
        """
        from torch.distributed.checkpoint import HuggingFaceStorageWriter
        from torch.distributed.checkpoint import state_dict_saver as dcp

        self.wait()
        writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
        held = {name: tensor.detach() for name, tensor in tensors.items()}  # gradients would be copied too
        saved = dcp.async_save(held, storage_writer=writer, process_group=self._channel)
        own = saved if isinstance(saved, Future) else saved.upload_completion

        def complete() -> None:
            own.result()
            if self._group.is_leader:
                finish()

        self._written = self._pool.submit(complete)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk; raises SharedError where one process could not write it."""
        if self._written is not None:
            written, self._written = self._written, None
            self._group.run_on_all(written.result)
