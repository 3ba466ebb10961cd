"""Files of a study as bytes, for machines that do not see its directory."""

import io
import os
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

#: Checkpoints and stored weights of a run, which an evaluation reads and does not change.
WEIGHTS = ("resume", "weights")


def pack(directory: Path, names: Iterable[str]) -> bytes:
    """Return the files and directories called `names` in a directory, those that exist."""
    package = io.BytesIO()
    with tarfile.open(fileobj=package, mode="w") as archive:
        for name in names:
            if (directory / name).exists():
                archive.add(directory / name, name)
    return package.getvalue()


def unpack(package: bytes, directory: Path) -> None:
    """Write the files of a package into a directory, which is created."""
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        archive.extractall(directory, filter="data")


def put(package: bytes, directory: Path, beside: Path, *, all_of_it: bool) -> None:
    """Replace the files of a directory by those of a package, one after the other.

    Args:
        package: of the content of the directory.
        directory: is created.
        beside: an existing directory on the same disk, for a temporary one.
        all_of_it: whether files that the package lacks are removed.
    """
    with TemporaryDirectory(prefix=".returned-", dir=beside) as name:
        fresh = Path(name)
        unpack(package, fresh)
        files = [path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()]
        if all_of_it:
            _remove_others(directory, {*files})
        for file in files:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(fresh / file, directory / file)


def _remove_others(directory: Path, files: set[Path]) -> None:
    """Remove the files that are not in `files`, and the directories without such files."""
    kept = {parent for file in files for parent in file.parents}
    for path in sorted(directory.rglob("*")):
        own = path.relative_to(directory)
        if path.is_dir() and own not in kept:
            shutil.rmtree(path)
        elif path.is_file() and own not in files:
            path.unlink()
