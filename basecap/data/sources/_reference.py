"""Writes `installed.txt` for this installation: `python -m basecap.data.sources._reference`.

Tests are left out, and generated files, which differ between platforms, and third-party code that a package includes
on some platforms only.
"""

import os
import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

from basecap.data.hashes import digest
from basecap.data.sources import installed
from basecap.system.files import replacing

#: Number of characters to choose for each domain.
CHARACTERS = {"prose": 6_000_000, "python": 1_200_000, "c": 1_200_000}

#: Minimum and maximum number of characters of a document; the bootstrap needs many documents.
SHORTEST, LONGEST = 800, {"prose": 20_000, "python": 5_000, "c": 5_000}

SKIPPED = {"__pycache__", "test", "tests", "site-packages", "dist-packages"}

#: Folders that some distributions and later versions of Python do not have.
OPTIONAL = {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"}
BUILT = ("_sysconfigdata", "__config__.py", "version.py")
PATCHED = {"numpy/__init__.py", "scipy/__init__.py"}  # wheels for Windows add code to these that loads libraries
HEADERS = ("torch/include/ATen", "torch/include/c10", "torch/include/torch", "numpy/_core/include")


def choose(characters: dict[str, int]) -> dict[str, list[str]]:
    """Return names of files by domain with the given total number of characters, drawn by the hashes of the names."""
    names = sorted(_names(), key=digest)
    modules = [name for name in names if name.endswith(".py") and name != installed.TOPICS]
    headers = [name for name in names if name.endswith((".h", ".hpp")) and name.startswith(HEADERS)]
    found = {"c": headers, "python": modules[::-1], "prose": modules}
    chosen = {domain: sorted(_up_to(characters[domain], domain, found[domain])) for domain in found}
    return {**chosen, "prose": [installed.TOPICS, *chosen["prose"]]}


def write(chosen: dict[str, list[str]], path: Path) -> None:
    """Write the names of files by folder, each with the hash of its text."""
    packages = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in installed.PACKAGES)
    lines = [f"# Python {platform.python_version()}, {packages}"]
    for domain in installed.DOMAINS:
        lines.append(f"[{domain}]")
        for folder, names in groupby(chosen[domain], key=lambda name: name.rpartition("/")[0]):
            digests = [(name.rpartition("/")[2], installed.text_digest(_file(name))) for name in names]
            lines += [folder, *(f" {name} {text}" for name, text in digests)]
    with replacing(path) as file:
        file.write("\n".join([*lines, ""]).encode())


def _names() -> Iterator[str]:
    for name, root in installed.roots().items():
        for folder, folders, files in os.walk(root):
            folders[:] = [folder for folder in folders if folder not in SKIPPED | OPTIONAL]
            place = "/".join((name, *Path(folder).relative_to(root).parts))
            if not place.startswith("torch/include/ATen/ops"):
                yield from {f"{place}/{file}" for file in files if not file.startswith(BUILT)} - PATCHED


def _up_to(characters: int, domain: str, names: Iterable[str]) -> Iterator[str]:
    """Yield names of files of a suitable length until their total number of characters is reached."""
    for name in names:
        content = installed.text_of(_file(name))
        size = sum(map(len, installed.docstrings(content))) if domain == "prose" else len(content)
        if SHORTEST <= size <= LONGEST[domain] and "generated" not in content[:500].lower():
            yield name
            characters -= size
        if characters <= 0:
            return


def _file(name: str) -> Path:
    package, _, rest = name.partition("/")
    return installed.roots()[package] / rest


if __name__ == "__main__":
    write(choose(CHARACTERS), installed.REFERENCE)
