"""Checkpoints of a sharded model: each process writes its part, beside the training, through PyTorch's own DCP.

resume/step-<n>/shard-<process>-model-00001-of-00001.safetensors    parts of the tensors, with their places
                state.json, SHA256SUMS                              as in other checkpoints

The tensors are called "model/<parameter>", "optimiser/<parameter>/<name>" and "average/<parameter>". Any number of
processes reads them, sharded or not. There is no pickle.
"""

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from basecap.errors import CheckpointError, describe_error

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


def begin_shards(directory: Path, tensors: Mapping[str, Tensor], channel: ProcessGroup) -> Callable[[], object]:
    """Copy tensors and begin to write them; return what waits until those of this process are written.

    Args:
        directory: made by the leading process before.
        tensors: sharded ones, and others that are the same in all processes.
        channel: a group of all processes on CPUs that nothing else uses meanwhile.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint import state_dict_saver as dcp

    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    held = {name: tensor.detach() for name, tensor in tensors.items()}  # gradients would be copied too
    saved = dcp.async_save(held, storage_writer=writer, process_group=channel)
    return (saved if isinstance(saved, Future) else saved.upload_completion).result
