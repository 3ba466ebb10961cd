"""A cache that several processes fill at once, as those of several machines do."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from basecap.data import DataConfig, _parts, prepare
from basecap.data.shards import write_shard
from basecap.data.sources import Document
from basecap.system import locks
from tests.forks import start


def fill(options: dict, cache: Path, log: Path, flock: bool, seconds: float) -> None:
    """Prepare a text as one of several machines does, and note which process has written which part."""

    def write(path: Path, documents: Iterator[Document], *given: object) -> None:
        def slow() -> Iterator[Document]:
            time.sleep(seconds)
            yield from documents

        log.open("a").write(f"{os.getpid()} begins {path.name}\n")
        write_shard(path, slow(), *given)
        log.open("a").write(f"{os.getpid()} ends {path.name}\n")

    _parts.write_shard, locks.LEASE = write, 2.0
    if not flock:
        locks._has_flock = lambda directory: False
    prepare(DataConfig(**options), cache)


@pytest.mark.parametrize("flock", [True, False])
def test_several_processes_fill_a_cache_together_and_take_over_what_a_killed_one_began(options, tmp_path, flock: bool):
    """Byte by byte the result is that of one process; each part is written once."""
    options |= {"tokenizer": "bpe", "vocab": 300, "max_train_tokens": 8000}
    cache, log = tmp_path / "cache", tmp_path / "log"

    def written() -> list[list[str]]:
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    killed = start(fill, options, cache, log, flock, 60.0, output=tmp_path / "killed")
    deadline = time.monotonic() + 60
    while not written():
        assert killed.is_alive() and time.monotonic() < deadline, (tmp_path / "killed").read_text()
        time.sleep(0.01)
    both = [start(fill, options, cache, log, flock, 0.1, output=tmp_path / f"{number}") for number in range(2)]
    while len(written()) < 4:
        assert time.monotonic() < deadline, (tmp_path / "0").read_text()
        time.sleep(0.01)
    killed.kill()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0], (tmp_path / "0").read_text() + (tmp_path / "1").read_text()
    begun = written()[0][2]
    ends = [(int(number), name) for number, what, name in written() if what == "ends"]
    assert {number for number, _ in ends} == {process.pid for process in both}
    assert len({name for _, name in ends}) == len(ends) and begun in {name for _, name in ends}

    prepare(DataConfig(**options), tmp_path / "alone")
    files = [
        {
            path.relative_to(root): path.read_bytes()
            for path in root.rglob("*")
            if path.is_file() and path.name != "lock"
        }
        for root in (cache, tmp_path / "alone")
    ]
    assert files[0] == files[1] and len(files[0]) > 10
