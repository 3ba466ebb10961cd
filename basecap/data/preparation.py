"""From text to prepared data: choose parts, make a tokenizer, write one shard per part, open all shards.

No work is repeated: the name of a shard is a hash of everything it depends on (including a plugin's code), so a killed
preparation resumes where it stopped, studies can share a cache, and a cache with `prepared-<hash of the options>.json`
can be opened without the original text.
"""

import json
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from basecap.data.config import FORMAT, DataConfig
from basecap.data.hashes import digest
from basecap.data.overlap import TextOverlap, covered_shares, rounds, sequence_length
from basecap.data.prepared import PreparedData
from basecap.data.shards import Limits, Shard, token_counts, write_shard
from basecap.data.sources import SOURCES, SPLITS, Part, Source, Split, plugin_of
from basecap.data.tokenizer import Tokenizer, byte_tokenizer, is_local, refuse_missing_file, train_bpe
from basecap.errors import BasecapError, DataError, nearest
from basecap.plugins import load_plugin
from basecap.system.files import FULL, LARGEST, replacing
from basecap.system.foreign import read_file
from basecap.system.locks import locked
from basecap.system.processes import WorkerKilled, WorkerPool, usable_cores
from basecap.system.progress import phase, progress, write_line

#: Characters per vocabulary entry that a tokenizer is trained on, divided equally among the training domains.
SAMPLE = 2_000

#: What helps where the cache cannot be written.
CACHE = "another directory with data.cache"

#: Number of parts searched for keys to suggest and for texts to compare, and of texts of each.
SUGGESTION_PARTS, COMPARED = 16, 4


def prepare(config: DataConfig, cache: Path) -> PreparedData:
    """Return the data of `config`, opened from `cache` or prepared into it.

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
            check_text(config, cache)
            with locked(cache):
                prepared = _reopen(config, cache, record) or _prepare(config, cache, record)
        return prepared


def find_prepared(config: DataConfig, cache: Path) -> PreparedData | None:
    """Return the data of `config` if `cache` has all of it, else None; writes nothing, raises as `prepare` does."""
    with _translated_os_errors(cache):
        return _reopen(config, cache, _record(config, cache))


def check_text(config: DataConfig, cache: Path) -> None:
    """Raise ConfigError or DataError if `prepare` would find no text; writes nothing and uses no network."""
    with _translated_os_errors(cache):
        source = SOURCES.get(config.source)(config)
        if not _record(config, cache).is_file() and source.download() is None:
            source.parts()


def missing_inputs(config: DataConfig, cache: Path) -> list[str]:
    """Return a sentence for each input of `prepare` that is missing on this machine; uses no network."""
    if _record(config, cache).is_file():
        return []
    found = []
    try:
        check_text(config, cache)
    except BasecapError as error:
        found.append(str(error))
    try:
        refuse_missing_file(config.tokenizer)
        if config.tokenizer not in ("bpe", "bytes") and Path(config.tokenizer).exists():
            Tokenizer.load(Path(config.tokenizer))
    except BasecapError as error:
        found.append(str(error))
    return found


def remote_inputs(config: DataConfig, cache: Path) -> list[str]:
    """Return a sentence for each input of `prepare` that comes from the network."""
    if _record(config, cache).is_file():
        return []
    streamed = SOURCES.get(config.source)(config).download()
    tokenizer = (
        f"tokenizer {config.tokenizer!r} is downloaded from the Hugging Face hub; give a local tokenizer.json with "
        "--set data.tokenizer=FILE to avoid that."
    )
    text = [] if streamed is None else [f"the text is streamed from {streamed}."]
    return [*text, *([] if is_local(config.tokenizer) else [tokenizer])]


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


def _limits(config: DataConfig) -> Limits:
    """Return the token limit of each split to keep: all splits of training domains, held-out splits of the others."""
    limits: dict[tuple[str, Split], int | None] = {
        (domain, "train"): config.max_train_tokens for domain in config.train
    }
    for domain in (*config.train, *config.ood):
        limits |= {(domain, split): config.max_test_tokens for split in SPLITS[1:]}
    return limits


def _reopen(config: DataConfig, cache: Path, record: Path) -> PreparedData | None:
    """Open the data that `record` lists; return None if any of it is missing."""
    if not record.is_file():
        return None
    try:
        content = json.loads(read_file(record, LARGEST))
        paths = [cache / content["tokenizer"], *(cache / "shards" / key for key in content["shards"])]
        if any(path.parent not in (cache, cache / "shards") or path.name == ".." for path in paths):
            raise ValueError("a path that leads out of the cache")
        overlap, remark = TextOverlap(**content["overlap"]), content["remark"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{record} is damaged; remove it and run again.") from error
    if not all(path.exists() for path in paths):
        return None
    tokenizer = Tokenizer.load(paths[0])
    if tokenizer.fingerprint not in paths[0].name:
        raise DataError(f"tokenizer {paths[0]} is damaged; remove it and run again.")
    return PreparedData(config, tokenizer, [Shard(path) for path in paths[1:]], _limits(config), overlap, remark)


def _prepare(config: DataConfig, cache: Path, record: Path) -> PreparedData:
    source = SOURCES.get(config.source)(config)
    # Training parts come last and in random order, so that reading can stop once there are enough tokens.
    parts = sorted(source.parts(), key=lambda part: (part.split == "train", digest(part.name)))
    tokenizer = _make_tokenizer(config, source, parts)
    if (text := tokenizer.use_gigatoken(_first_texts(source, parts))) is not None:
        write_line(f"gigatoken gives other ids than tokenizers for {text[:40]!r}; text is encoded with tokenizers.")
    path = cache / f"tokenizer-{tokenizer.fingerprint}.json"
    with replacing(path, CACHE) as file:
        file.write(tokenizer.description.encode())
    directory = cache / "shards"
    directory.mkdir(exist_ok=True)
    before = set(directory.iterdir())
    write = partial(_write_part, config, tokenizer, directory)
    shards: list[Path] = []
    held: Counter[str] = Counter()
    with (
        progress("preparing text", total=len(parts), unit="parts") as advance,
        closing(_write_parts(config, write, parts)) as written,
    ):
        for part, shard in zip(parts, written, strict=False):
            shards.append(shard)
            advance(1, note=part.name)
            held.update(token_counts(shard))
            limit = config.max_train_tokens
            if part.split == "train" and limit and all(held[f"{domain}/train"] >= limit for domain in config.train):
                break
    for surplus in set(directory.iterdir()) - before - set(shards):
        shutil.rmtree(surplus)
    opened, limits = [Shard(shard) for shard in shards], _limits(config)
    prepared = PreparedData(config, tokenizer, opened, limits)
    if config.cluster is not None and not any(found.labelled for found in prepared.held_out.values()):
        if not source.has_records:
            what = "no held-out document is in a folder of its domain"
            raise DataError(f"{what}, as data.cluster = {config.cluster!r} needs; leave it out.")
        known = {key for part in parts[:SUGGESTION_PARTS] for key in source.keys(part)}
        raise DataError(
            f"no held-out document has the key data.cluster = {config.cluster!r}: {nearest(config.cluster, known)}"
        )
    overlap = _overlap(prepared, config.overlap, config.workers or usable_cores())
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
        for document in source.read(part):
            if document.split == "train" and left.get(document.domain):
                text = document.text[: left[document.domain]]
                left[document.domain] -= len(text)
                yield text.encode("utf-8", errors="replace").decode("utf-8")
            if not any(left.values()):
                return


def _first_texts(source: Source, parts: Sequence[Part]) -> Iterator[str]:
    """Yield some of the first texts of the first parts."""
    for part in parts[:SUGGESTION_PARTS]:
        for document in islice(source.read(part), COMPARED):
            yield document.text.encode("utf-8", errors="replace").decode("utf-8")


def _write_part(config: DataConfig, tokenizer: Tokenizer, directory: Path, part: Part) -> Path:
    """Return the path of a part's shard; write the shard if it does not exist."""
    source = SOURCES.get(config.source)(config)
    files, limits = source.fingerprints(part), _limits(config)
    kept = sorted([*group, limit] for group, limit in limits.items())
    code = [] if config.code is None else [config.code]  # built-in sources have no code hash in their shard names
    shortest = {} if config.min_ood_tokens is None else dict.fromkeys(config.ood, config.min_ood_tokens)
    further = [sorted(shortest.items()), config.cluster]
    path = directory / digest([FORMAT, config.source, files, tokenizer.fingerprint, kept, *code, *further])
    if not path.is_dir():
        write_shard(path, source.read(part), tokenizer, limits, files, shortest)
    return path


def _write_parts(
    config: DataConfig, write: Callable[[Part], Path], parts: Sequence[Part]
) -> Generator[Path, None, None]:
    """Yield the shards of `parts` in order, written by up to `config.workers` processes."""
    workers = min(config.workers or usable_cores(), len(parts))
    if workers == 1:
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
