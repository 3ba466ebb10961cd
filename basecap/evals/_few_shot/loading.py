"""How tasks of lm-evaluation-harness are loaded: what goes wrong is named, and the hub is not waited for."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from basecap.errors import BasecapError, DataError, describe_error
from basecap.system.hub import without_retries


@contextlib.contextmanager
def named(task: str) -> Iterator[None]:
    """Raise DataError with the name of the task for what its files, its data or its code may raise."""
    try:
        yield
    except BasecapError as error:
        raise type(error)(f"few-shot: task {task!r}: {error}") from error
    except Exception as error:  # other people's code and the network may raise anything
        advice = "correct its task file or its data, or leave the task out."
        if _of_hub(error):
            advice = (
                "connect to the Hugging Face hub once, so that it is stored here, or give path with task files whose "
                "data is on this machine."
            )
        raise DataError(f"few-shot: task {task!r} cannot be asked ({describe_error(error)}); {advice}") from error


def _of_hub(error: Exception) -> bool:
    """Whether data on the Hugging Face hub was out of reach, and not stored on this machine."""
    library = type(error).__module__.partition(".")[0]
    stored = re.search(r"\b(Hub|[Cc]ouldn't find cache|HF_\w*OFFLINE)\b", str(error))
    return isinstance(error, ConnectionError) or library in ("huggingface_hub", "requests", "httpx") or bool(stored)


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """Ask once whether the hub is in reach before a task loads data from it; else take what is stored here."""
    import datasets

    load = datasets.load_dataset

    def _load(path: str, *places: Any, **options: Any) -> Any:
        local = options.get("data_files") is not None or Path(path).exists()
        with contextlib.nullcontext() if local else without_retries():
            return load(path, *places, **options)

    with patch.object(datasets, "load_dataset", _load):
        yield
