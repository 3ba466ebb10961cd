"""Compiled templates, kept where Python keeps compiled modules: to compile them takes a tenth of a second."""

import contextlib
import sys
from importlib.util import cache_from_source
from pathlib import Path

from jinja2.bccache import Bucket, BytecodeCache

from basecap.errors import DataError
from basecap.system.files import read, replacing


class Compiled(BytecodeCache):
    """Keeps the compiled templates of a directory in its `__pycache__`, as far as it can be written.

    jinja2 compares versions and the template's own text before it uses one.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    def load_bytecode(self, bucket: Bucket) -> None:
        """Read a compiled template, where there is one."""
        with contextlib.suppress(DataError):
            if found := read(self._path(bucket)):
                bucket.bytecode_from_string(found)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Write a compiled template, unless Python is to keep none."""
        if not sys.dont_write_bytecode:
            with contextlib.suppress(DataError), replacing(self._path(bucket)) as file:
                file.write(bucket.bytecode_to_string())

    def _path(self, bucket: Bucket) -> Path:
        return Path(cache_from_source(str(self.directory / f"{bucket.key}.py")))
