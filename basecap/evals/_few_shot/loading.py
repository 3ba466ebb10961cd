"""How tasks of lm-evaluation-harness are found and loaded: what goes wrong is named, and the hub is not waited for."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from basecap.errors import BasecapError, ConfigError, DataError, describe_error, nearest
from basecap.system.hub import without_retries

#: The names in a task file: of a task, a group or a tag, or items of a list of them.
_NAMES = re.compile(
    rb"""^[ \t]*(?:-[ \t]+)?(?:["']?(?:task|group|tag)["']?[ \t]*:[ \t]*)?["']?([\w./+-]+)["']?[ \t\r,]*$""", re.M
)


@cache
def refuse_unknown(names: Sequence[str], path: str | None) -> None:
    """Raise ConfigError for a name that no task file has, in a directory or in the library, which is not imported.

    The library's own index of names takes ten seconds, because it reads files as YAML; here only a text is searched.
    A name that stands in a file for something else passes, and is refused when it is loaded.
    """
    if path is None:
        spec = find_spec("lm_eval")
        places = [] if spec is None else [Path(place) / "tasks" for place in spec.submodule_search_locations or ()]
    else:
        places = [directory_of(path)]
    left, texts = {name.encode() for name in names}, list[bytes]()
    for file in (file for place in places for file in place.rglob("*yaml*")):  # also of templates, "_default_yaml"
        texts.append(file.read_bytes())
        left = {name for name in left if not _stands_in(name, texts[-1])}
        if not left:
            return
    if places:
        first = next(name for name in names if name.encode() in left)
        known = {found.decode() for text in texts for found in _NAMES.findall(text)}
        raise unknown(first, known, path)


def _stands_in(name: bytes, text: bytes) -> bool:
    return name in text and re.search(rb"(?<![\w.-])" + re.escape(name) + rb"(?![\w.-])", text) is not None


def directory_of(path: str) -> Path:
    """Return the option `path`; raises ConfigError unless it is a directory."""
    if not Path(path).is_dir():
        raise ConfigError(f"few-shot: path {path} is not a directory; give one with task files (*.yaml).")
    return Path(path)


def unknown(name: str, known: Iterable[str], path: str | None) -> ConfigError:
    """Return the error for a name that is none of the `known` ones, which are those of a directory or the library's."""
    where = f"{path} has no task" if path else "unknown task"
    return ConfigError(f"few-shot: {where} {name!r}: {nearest(name, known, see='lm-eval ls tasks')}")


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
