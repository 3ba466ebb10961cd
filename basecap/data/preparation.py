"""From text to prepared data: choose parts, make a tokenizer, write one shard per part, open all shards.

No work is repeated: the name of a shard is a hash of everything it depends on (including a plugin's code), so a killed
preparation resumes where it stopped, several machines fill a cache together (`_parts.py`), studies can share it, and a
cache with `prepared-<hash of the options>.json` can be opened without the original text.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from basecap.data._parts import CLAIM, SHARDS, limits_of, remove_surplus, write_shards
from basecap.data.config import DataConfig
from basecap.data.hashes import digest
from basecap.data.overlap import TextOverlap, covered_shares, rounds, sequence_length
from basecap.data.prepared import PreparedData
from basecap.data.shards import Shard
from basecap.data.sources import SOURCES, Part, Source
from basecap.data.tokenizer import Tokenizer, byte_tokenizer, is_local, is_path, refuse_missing_file, train_bpe
from basecap.errors import BasecapError, DataError, nearest
from basecap.plugins import faults
from basecap.system.files import FULL, LARGEST, replacing
from basecap.system.foreign import read_file
from basecap.system.locks import Busy, locked, remove_ended
from basecap.system.processes import usable_cores
from basecap.system.progress import phase, progress, write_line

#: Characters per vocabulary entry that a tokenizer is trained on, divided equally among the training domains.
SAMPLE = 2_000

#: What helps where the cache cannot be written.
CACHE = "another directory with data.cache"

#: Number of parts searched for keys to suggest and for texts to compare, and of texts of each.
SUGGESTION_PARTS, COMPARED = 16, 4


def prepare(config: DataConfig, cache: Path) -> PreparedData:
    """Return the data of `config`, opened from `cache` or prepared into it.

    Processes, also on several machines, that prepare the same text into one cache at once share the parts.

    Args:
        config: the data section of a study; `config.cache` is not used here.
        cache: directory of shards and tokenizers; studies and processes can share it.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or `data.path` is not set.
        DataError: text is missing, empty, damaged or too short, a shard is damaged, or the disk is full.
    """
    record = _record(config, cache)
    with _translated_os_errors(cache):
        prepared = _reopen(config, cache, record)
        if prepared is None:
            check_inputs(config, cache)
            cache.mkdir(parents=True, exist_ok=True)
        while prepared is None:
            prepared = _prepare(config, cache, record)
        return prepared


def find_prepared(config: DataConfig, cache: Path) -> PreparedData | None:
    """Return the data of `config` if `cache` has all of it, else None; writes nothing, raises as `prepare` does."""
    with _translated_os_errors(cache):
        return _reopen(config, cache, _record(config, cache))


def check_inputs(config: DataConfig, cache: Path) -> None:
    """Raise ConfigError or DataError if `prepare` would lack text or tokenizer; writes nothing and uses no network."""
    with _translated_os_errors(cache):
        source = _source(config)
        if not _record(config, cache).is_file():
            _check_text(source)
            _check_tokenizer(config)


def _source(config: DataConfig) -> Source:
    with faults(f"source {config.source!r} cannot be opened", DataError):
        return SOURCES.get(config.source)(config)


def _faults_of(source: Source) -> AbstractContextManager[None]:
    """Raise DataError, with the line of a plugin, for whatever the code of a source may raise."""
    return faults(f"source {source.config.source!r} fails", DataError)


def _check_text(source: Source) -> None:
    with _faults_of(source):
        streamed = source.download()
    if streamed is None:
        _parts(source)


def _check_tokenizer(config: DataConfig) -> None:
    refuse_missing_file(config.tokenizer)
    if config.tokenizer not in ("bpe", "bytes") and Path(config.tokenizer).exists():
        Tokenizer.load(Path(config.tokenizer))


def missing_inputs(config: DataConfig, cache: Path) -> list[str]:
    """Return a sentence for each input of `prepare` that is missing on this machine; uses no network."""
    if _record(config, cache).is_file():
        return []
    found = []
    for check in (lambda: _check_text(_source(config)), partial(_check_tokenizer, config)):
        try:
            with _translated_os_errors(cache):
                check()
        except BasecapError as error:
            found.append(str(error))
    return found


def remote_inputs(config: DataConfig, cache: Path) -> list[str]:
    """Return a sentence for each input of `prepare` that comes from the network."""
    if _record(config, cache).is_file():
        return []
    source = _source(config)
    with _faults_of(source):
        streamed = source.download()
    tokenizer = (
        f"tokenizer {config.tokenizer!r} is downloaded from the Hugging Face hub; give a local tokenizer.json with "
        "--set data.tokenizer=FILE to avoid that."
    )
    text = [] if streamed is None else [f"the text is streamed from {streamed}."]
    return [*text, *([] if is_local(config.tokenizer) or is_path(config.tokenizer) else [tokenizer])]


@contextmanager
def _translated_os_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = FULL.get(error.errno or 0)
        file = f" ({error.filename})" if error.filename else ""
        reason = full or f"{error.strerror or error}{file}"
        what = "free disk space" if full else "fix that"
        raise DataError(
            f"the data could not be prepared in {cache}: {reason}; {what} or set data.cache to another directory, "
            "and run again. Finished shards are kept."
        ) from error


def _record(config: DataConfig, cache: Path) -> Path:
    return cache / f"prepared-{config.hash}.json"


def _reopen(config: DataConfig, cache: Path, record: Path) -> PreparedData | None:
    """Open the data that `record` lists; return None if any of it is missing."""
    if not record.is_file():
        return None
    try:
        content = json.loads(read_file(record, LARGEST))
        paths = [cache / content["tokenizer"], *(cache / SHARDS / key for key in content["shards"])]
        if any(path.parent not in (cache, cache / SHARDS) or path.name == ".." for path in paths):
            raise ValueError("a path that leads out of the cache")
        overlap, remark = TextOverlap(**content["overlap"]), content["remark"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{record} is damaged; remove it and run again.") from error
    if not all(path.exists() for path in paths):
        return None
    tokenizer = Tokenizer.load(paths[0])
    if tokenizer.fingerprint not in paths[0].name:
        raise DataError(f"tokenizer {paths[0]} is damaged; remove it and run again.")
    return PreparedData(config, tokenizer, [Shard(path) for path in paths[1:]], limits_of(config), overlap, remark)


def _prepare(config: DataConfig, cache: Path, record: Path) -> PreparedData | None:
    """Return the prepared data, to which this process may have contributed some shards; None if some were removed."""
    source = _source(config)
    parts = _parts(source)
    tokenizer = _make_tokenizer(config, source, parts)  # the same in every process
    if (text := tokenizer.use_gigatoken(_first_texts(source, parts))) is not None:
        write_line(f"gigatoken gives other ids than tokenizers for {text[:40]!r}; text is encoded with tokenizers.")
    directory, before = cache / SHARDS, _changed(record)
    directory.mkdir(exist_ok=True)
    held = set(directory.iterdir())
    shards = write_shards(config, cache, tokenizer, parts, lambda: _changed(record) != before)
    with _alone(cache):
        remove_ended(cache, CLAIM)
        prepared = _reopen(config, cache, record)
        if prepared is None and shards is not None:
            prepared = _complete(config, cache, record, source, tokenizer, shards)
    if prepared is not None:
        remove_surplus(config, tokenizer, set(directory.iterdir()) - held - set(prepared.shards))
    return prepared


def _parts(source: Source) -> list[Part]:
    """Return the parts: those for training last and in random order, so that reading can stop at enough tokens."""
    with _faults_of(source):
        return sorted(source.parts(), key=lambda part: (part.split == "train", digest(part.name)))


def _changed(record: Path) -> tuple[int, int] | None:
    """Return what differs after a record was written, None where there is none."""
    try:
        found = record.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Hold the lock of the cache; says so when another process has it."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(cache, "another process completes a text"))
        except Busy:
            write_line(f"waiting for another process that completes a text in {cache}.")
            held.enter_context(locked(cache))
        yield


def _complete(
    config: DataConfig, cache: Path, record: Path, source: Source, tokenizer: Tokenizer, shards: Sequence[Path]
) -> PreparedData:
    """Write the tokenizer and the record of the data, after all shards; return the data."""
    path = cache / f"tokenizer-{tokenizer.fingerprint}.json"
    with replacing(path, CACHE) as file:
        file.write(tokenizer.description.encode())
    opened, limits = [Shard(shard) for shard in shards], limits_of(config)
    prepared = PreparedData(config, tokenizer, opened, limits)
    if config.cluster is not None and not any(found.labelled for found in prepared.held_out.values()):
        if not source.has_records:
            what = "no held-out document is in a folder of its domain"
            raise DataError(f"{what}, as data.cluster = {config.cluster!r} needs; leave it out.")
        with _faults_of(source):
            known = {key for part in _parts(source)[:SUGGESTION_PARTS] for key in source.keys(part)}
        raise DataError(
            f"no held-out document has the key data.cluster = {config.cluster!r}: {nearest(config.cluster, known)}"
        )
    overlap = _overlap(prepared, config.overlap, config.workers or usable_cores())
    with _faults_of(source):
        remark = source.remark()
    prepared = PreparedData(config, tokenizer, opened, limits, overlap, remark)
    content = {
        "config": config.model_dump(mode="json"),
        "tokenizer": path.name,
        "shards": [shard.name for shard in shards],
        "overlap": asdict(overlap),
        "remark": remark,
    }
    with replacing(record, CACHE) as file:
        file.write(json.dumps(content, indent=1).encode())
    return prepared


def _overlap(prepared: PreparedData, limit: float | None, threads: int) -> TextOverlap:
    """Return the overlap of all held-out documents with the training text, searched by so many threads."""
    training = [prepared.documents("train", domain) for domain in prepared.train_domains]
    n = sequence_length(sum(held.total_tokens for held in training), sum(held.total_bytes for held in training))
    held_out = prepared.held_out
    firsts = np.cumsum([0, *(len(held) for held in held_out.values())])
    sets = list(held_out.values())

    def document(number: int) -> np.ndarray:
        place = int(np.searchsorted(firsts, number, side="right")) - 1
        return sets[place].tokens(number - int(firsts[place]))

    sizes = np.concatenate([held.sizes for held in sets])
    runs = [run for held in training for run in held.runs]
    total = rounds(sizes) * sum(map(len, runs))
    with progress("overlap of held-out and training text", total=total) as advance:
        covered = covered_shares(sizes, document, runs, n, advance, threads)
    overlap = TextOverlap(n, {}, {})
    for (key, held), found in zip(held_out.items(), np.split(covered, firsts[1:-1]), strict=True):
        sizes = np.delete(held.sizes, held.copies)
        overlap.shares["/".join(key)] = float(np.delete(found, held.copies) @ sizes / max(1, int(sizes.sum())))
        known = [] if limit is None else np.setdiff1d(np.flatnonzero(found > limit), held.copies).tolist()
        overlap.left_out["/".join(key)] = known
    return overlap


def _make_tokenizer(config: DataConfig, source: Source, parts: Sequence[Part]) -> Tokenizer:
    if config.tokenizer == "bytes":
        return byte_tokenizer()
    if config.tokenizer == "bpe":
        with phase("training the tokenizer"):
            return train_bpe(_sample(config, source, parts), config.vocab)
    path = Path(config.tokenizer)
    return Tokenizer.load(path) if path.exists() else Tokenizer.from_hub(config.tokenizer)


def _sample(config: DataConfig, source: Source, parts: Sequence[Part]) -> Iterator[str]:
    """Yield training texts from the first parts, the same amount of every domain if there is enough text."""
    left = dict.fromkeys(config.train, SAMPLE * config.vocab // len(config.train))
    for part in parts:
        if part.split not in (None, "train"):
            continue
        for document in source.documents(part):
            if document.split == "train" and left.get(document.domain):
                text = document.text[: left[document.domain]]
                left[document.domain] -= len(text)
                yield text.encode("utf-8", errors="replace").decode("utf-8")
            if not any(left.values()):
                return


def _first_texts(source: Source, parts: Sequence[Part]) -> Iterator[str]:
    """Yield some of the first texts of the first parts."""
    for part in parts[:SUGGESTION_PARTS]:
        for document in islice(source.documents(part), COMPARED):
            yield document.text.encode("utf-8", errors="replace").decode("utf-8")
