"""The shards of the parts of a text: each is written once, by whichever process on whichever machine claims it first.

A claim is a lock in the cache (`basecap.system.locks`), which ends with its process: another one then takes the part
over. A shard has its name as soon as it is complete, so the cache says which parts are left. All processes take the
parts in one order, pass over those that others write, and wait for these in the end.
"""

import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from basecap.data.config import FORMAT, DataConfig
from basecap.data.hashes import digest
from basecap.data.shards import Limits, token_counts, write_shard
from basecap.data.sources import SOURCES, SPLITS, Part, Split, plugin_of
from basecap.data.tokenizer import Tokenizer
from basecap.errors import DataError
from basecap.plugins import load_plugin
from basecap.system.files import LARGEST
from basecap.system.foreign import read_file
from basecap.system.locks import Busy, is_locked, locked
from basecap.system.processes import WorkerKilled, WorkerPool, usable_cores
from basecap.system.progress import progress

#: Directory of the shards in a cache, and beginning of the names of the locks beside it.
SHARDS, CLAIM = "shards", "part-"
#: Seconds between two looks at the parts that other processes write.
PAUSE = 0.2


def limits_of(config: DataConfig) -> Limits:
    """Return the token limit of each split to keep: all splits of training domains, held-out splits of the others."""
    limits: dict[tuple[str, Split], int | None] = {
        (domain, "train"): config.max_train_tokens for domain in config.train
    }
    for domain in (*config.train, *config.ood):
        limits |= {(domain, split): config.max_test_tokens for split in SPLITS[1:]}
    return limits


def write_shards(
    config: DataConfig, cache: Path, tokenizer: Tokenizer, parts: Sequence[Part], done: Callable[[], bool]
) -> list[Path] | None:
    """Return the shards of the first parts, as many as are needed, after all of them were written, here or elsewhere.

    Args:
        config: the data section of a study.
        cache: the directory that processes share.
        tokenizer: the tokenizer, the same in all of them.
        parts: all parts of the source, in the order in which they are read.
        done: whether another process has completed the preparation; None is returned then.
    """
    write = partial(_write_part, config, tokenizer, cache)
    paths: list[Path] = []
    held: Counter[str] = Counter()
    with progress("preparing text", total=len(parts), unit="parts") as advance:
        with closing(_write_parts(config, write, parts)) as written:
            for part, path in zip(parts, written, strict=False):
                paths.append(path)
                with suppress(FileNotFoundError):  # another process writes it now
                    held.update(token_counts(path))
                    advance(1, note=part.name)
                if done():
                    return None
                if part.split == "train" and _enough(config, held):
                    break
        missing = [number for number, path in enumerate(paths) if not path.is_dir()]
        while missing:
            advance(0, note=f"waiting for {len(missing)} that other processes write")
            free = [number for number in missing if not is_locked(cache, _claim(paths[number]))]
            with closing(_write_parts(config, write, [parts[number] for number in free])) as written:
                for _ in written if free else ():
                    pass
            time.sleep(0 if free else PAUSE)
            if done():
                return None
            left = [number for number in missing if not paths[number].is_dir()]
            advance(len(missing) - len(left))
            missing = left
    return _needed(config, parts, paths)


def _needed(config: DataConfig, parts: Sequence[Part], paths: Sequence[Path]) -> list[Path]:
    """Return the first shards, until the training domains have enough tokens."""
    held: Counter[str] = Counter()
    needed = []
    for part, path in zip(parts, paths, strict=False):
        needed.append(path)
        held.update(token_counts(path))
        if part.split == "train" and _enough(config, held):
            break
    return needed


def _enough(config: DataConfig, held: Counter[str]) -> bool:
    limit = config.max_train_tokens
    return limit is not None and all(held[f"{domain}/train"] >= limit for domain in config.train)


def remove_surplus(config: DataConfig, tokenizer: Tokenizer, shards: set[Path]) -> None:
    """Remove those of `shards` that belong to this text: workers wrote them after there was enough."""
    for path in shards:
        with suppress(FileNotFoundError, NotADirectoryError):  # another process removes it, too
            files = json.loads(read_file(path / "shard.json", LARGEST))["files"]
            if path.name == _name(config, tokenizer, files):
                shutil.rmtree(path)


def _name(config: DataConfig, tokenizer: Tokenizer, files: dict[str, str]) -> str:
    """Return the name of the shard of a part with these files: the hash of everything that it depends on."""
    kept = sorted([*group, limit] for group, limit in limits_of(config).items())
    code = [] if config.code is None else [config.code]  # built-in sources have no code hash in their shard names
    shortest = [] if config.min_ood_tokens is None else sorted((name, config.min_ood_tokens) for name in config.ood)
    return digest([FORMAT, config.source, files, tokenizer.fingerprint, kept, *code, shortest, config.cluster])


def _claim(path: Path) -> str:
    return f"{CLAIM}{path.name}.lock"


def _write_part(config: DataConfig, tokenizer: Tokenizer, cache: Path, part: Part) -> Path:
    """Return the path of a part's shard; write it unless it exists, or another process writes it now."""
    source = SOURCES.get(config.source)(config)
    files = source.fingerprints(part)
    path = cache / SHARDS / _name(config, tokenizer, files)
    shortest = {} if config.min_ood_tokens is None else dict.fromkeys(config.ood, config.min_ood_tokens)
    with suppress(Busy):
        if not path.is_dir():
            with locked(cache, f"{part.name} is claimed", _claim(path), keep=False) as lock:
                try:
                    if not path.is_dir():
                        write_shard(path, source.documents(part), tokenizer, limits_of(config), files, shortest)
                except OSError:
                    if not lock.lost:  # else the process that took it over has removed what was written here
                        raise
    return path


def _write_parts(
    config: DataConfig, write: Callable[[Part], Path], parts: Sequence[Part]
) -> Generator[Path, None, None]:
    """Yield the shards of `parts` in order, written by up to `config.workers` processes."""
    workers = min(config.workers or usable_cores(), len(parts))
    if workers <= 1:
        yield from map(write, parts)
        return
    with WorkerPool(_begin_worker, [(write, plugin_of(config.source), config.code)] * workers) as pool:
        for part, future in zip(parts, pool.run_in_order(_write_in_worker, parts), strict=True):
            try:
                yield future.result()
            except WorkerKilled as error:
                raise DataError(
                    f"the process that prepared {part.name} was killed twice, possibly out of memory; lower "
                    "data.workers and run again: finished shards are kept."
                ) from error


_worker: dict[str, Callable[[Part], Path]] = {}


def _begin_worker(start: tuple[Callable[[Part], Path], Path | None, str | None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process, and prints what there is to say
    write, plugin, digest = start
    if plugin is not None:
        load_plugin(plugin, digest)
    _worker["write"] = write


def _write_in_worker(part: Part) -> Path:
    return _worker["write"](part)
