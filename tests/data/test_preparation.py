"""Preparation: the same result however it came about, nothing done twice, one sentence when it cannot be."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from basecap.data import DataConfig, PreparedData, inspect, prepare
from basecap.data.sources import split_of
from basecap.errors import ConfigError, DataError
from tests.data.conftest import slimpajama_records, words, write_lines

pytestmark = pytest.mark.usefixtures("quick_workers")


def content(prepared: PreparedData) -> dict:
    """Return all tokens by domain and split, and some batches."""
    held = {
        key: [documents.tokens(index).tolist() for index in range(len(documents))]
        for key, documents in prepared.sets.items()
    }
    return {**held, "batch": prepared.train.batch(3, 5, 4, 16).tolist(), "hash": prepared.manifest_hash}


def shards(cache: Path) -> dict[str, int]:
    """Return the shards of a cache with the time each was written."""
    return {path.name: path.stat().st_mtime_ns for path in sorted((cache / "shards").iterdir())}


def test_what_is_prepared_is_what_was_written(options, tmp_path):
    prepared = prepare(DataConfig(**options), tmp_path)
    assert (prepared.train_domains, prepared.ood_domains) == (("commoncrawl", "c4"), ("arxiv",))
    for domain, split, first in (("c4", "train", 0), ("c4", "test", 1100), ("arxiv", "validation", 1000)):
        numbers = [first + 100 * file + number for file in range(4) for number in range(20)]
        wanted = {words(domain, number) for number in (numbers if split == "train" else numbers[:8])}
        documents = prepared.documents(split, domain)
        found = [prepared.tokenizer.decode(documents.tokens(index)) for index in range(len(documents))]
        assert set(found) == wanted and len(found) == len(wanted) and documents.domain == domain
        sizes = [len(text.encode()) for text in found]
        assert [documents.bytes(index) for index in range(len(documents))] == sizes
        assert documents.total_tokens == documents.total_bytes == sum(sizes)
    with pytest.raises(IndexError):
        documents.tokens(len(documents))


def test_the_stream_holds_the_training_documents_between_ends(options, tmp_path):
    prepared = prepare(DataConfig(**options), tmp_path)
    sets = [prepared.documents("train", domain) for domain in ("commoncrawl", "c4")]
    assert prepared.train.tokens == sum(documents.total_tokens + len(documents) for documents in sets)
    row = prepared.train.batch(0, 0, 1, prepared.train.tokens)[0, 1:].numpy()
    first, *pieces, last = np.split(row, np.flatnonzero(row == prepared.tokenizer.end_of_text))
    found = {prepared.tokenizer.decode(piece[1:]) for piece in pieces}
    wanted = {prepared.tokenizer.decode(held.tokens(index)) for held in sets for index in range(len(held))}
    assert found < wanted and len(pieces) == 159
    assert prepared.tokenizer.decode([*last[1:], *first]) in wanted


def test_no_file_stays_open(options, tmp_path):
    prepared = prepare(DataConfig(**options), tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    kept = [prepared.train.batch(0, step, 8, 16) for step in range(4)]
    kept += [prepared.documents("train", "c4").tokens(index) for index in range(80)]
    assert len(kept) == 84 and len(os.listdir("/proc/self/fd")) == before


def test_parallel_is_serial(options, tmp_path):
    one = prepare(DataConfig(**options, max_train_tokens=12_000), tmp_path / "one")
    two = prepare(DataConfig(**{**options, "workers": 2}, max_train_tokens=12_000), tmp_path / "two")
    assert content(one) == content(two)
    assert list(shards(tmp_path / "one")) == list(shards(tmp_path / "two"))


def test_the_manifest_names_files_not_places(options, tmp_path):
    shutil.copytree(options["path"], tmp_path / "copy")
    here = prepare(DataConfig(**options), tmp_path / "one")
    there = prepare(DataConfig(**{**options, "path": str(tmp_path / "copy")}), tmp_path / "two")
    assert here.manifest == there.manifest and here.manifest_hash == there.manifest_hash
    assert len(here.manifest["files"]) == 6 and here.manifest["documents"]["c4/train"]["documents"] == 80
    write_lines(tmp_path / "copy" / "test" / "chunk1" / "more.jsonl", slimpajama_records(5000, 1))
    changed = prepare(DataConfig(**{**options, "path": str(tmp_path / "copy")}), tmp_path / "three")
    assert changed.manifest_hash != here.manifest_hash


def test_bpe_is_trained_on_training_documents_alone(options, tmp_path):
    config = DataConfig(**{**options, "tokenizer": "bpe", "vocab": 400})
    prepared = prepare(config, tmp_path / "one")
    learnt = prepared.tokenizer
    assert learnt.vocab_size <= 400 and len(learnt.encode(" meeting")) == 1 and len(learnt.encode(" theorem")) > 1
    assert content(prepare(config, tmp_path / "two")) == content(prepared)
    (path,) = (tmp_path / "one").glob("tokenizer-*.json")
    again = prepare(config.model_copy(update={"tokenizer": str(path)}), tmp_path / "three")
    assert again.tokenizer.fingerprint == learnt.fingerprint


def test_a_complete_cache_needs_neither_text_nor_libraries(options, tmp_path):
    shutil.copytree(options["path"], tmp_path / "copy")
    options |= {"path": str(tmp_path / "copy"), "tokenizer": "bpe", "vocab": 300}
    first = content(prepare(DataConfig(**options), tmp_path / "cache"))
    shutil.rmtree(tmp_path / "copy")
    (tmp_path / "cache").rename(tmp_path / "carried")
    for path in (tmp_path / "carried").rglob("*"):
        path.chmod(0o500 if path.is_dir() else 0o400)
    program = f"""
import json, sys
from pathlib import Path
sys.modules |= dict.fromkeys(("zstandard", "tokenizers", "datasets", "torch"))
from basecap.data import DataConfig, prepare
prepared = prepare(DataConfig(**json.loads({json.dumps(options)!r})), Path({str(tmp_path / "carried")!r}))
print(prepared.manifest_hash, prepared.tokenizer.vocab_size, prepared.documents("test", "c4").total_tokens)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert found == [first["hash"], "300", str(sum(len(tokens) for tokens in first["c4", "test"]))]


def test_shards_are_shared_and_not_written_twice(options, tmp_path):
    prepare(DataConfig(**options), tmp_path)
    written = shards(tmp_path)
    assert len(written) == 6
    prepare(DataConfig(**{**options, "seq_len": 64, "weights": {"c4": 1, "commoncrawl": 2}}), tmp_path)
    assert len(list(tmp_path.glob("prepared-*"))) == 1
    (prepared,) = tmp_path.glob("prepared-*")
    prepared.unlink()
    prepare(DataConfig(**options), tmp_path)
    assert shards(tmp_path) == written
    prepare(DataConfig(**{**options, "tokenizer": "bpe", "vocab": 300}), tmp_path)
    assert len(shards(tmp_path)) == 12


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("path", "elsewhere"),
        ("tokenizer", "bpe"),
        ("vocab", 500),
        ("train", ["c4"]),
        ("ood", []),
        ("max_train_tokens", 5000),
        ("max_test_tokens", 5000),
        ("hub", "somebody/something"),
        ("cluster", "meta.redpajama_set_name"),
        ("overlap", None),
    ],
)
def test_any_option_that_changes_tokens_changes_the_key(options, key: str, value: object):
    assert DataConfig(**options).hash != DataConfig(**{**options, key: value}).hash
    assert DataConfig(**options).hash == DataConfig(**{**options, "workers": 7, "cache": "there"}).hash


def test_limits_hold_and_stop_the_reading(options, tmp_path):
    config = DataConfig(**options, max_train_tokens=6000, max_test_tokens=4000)
    prepared = prepare(config, tmp_path)
    for (_, split), documents in prepared.sets.items():
        limit = 6000 if split == "train" else 4000
        assert 0.75 * min(limit, 8 * 380) <= documents.total_tokens + len(documents) <= limit
    assert len(shards(tmp_path)) == 3  # both held-out files and one of four training files
    everything = prepare(DataConfig(**options), tmp_path / "all").documents("test", "c4")
    texts = {tuple(everything.tokens(index)) for index in range(len(everything))}
    kept = prepared.documents("test", "c4")
    assert {tuple(kept.tokens(index)) for index in range(len(kept))} <= texts


def test_killed_in_the_middle_it_goes_on(options, tmp_path):
    config = DataConfig(**{**options, "workers": 2})
    program = f"""
import time
from collections.abc import Iterator
from pathlib import Path
from basecap.data import DataConfig, prepare
from basecap.data.tokenizer import Tokenizer

class Slow(Tokenizer):
    def encode_document(self, text):
        time.sleep(0.005)
        return super().encode_document(text)

if __name__ == "__main__":
    import basecap.data.preparation as module
    made = module._make_tokenizer
    module._make_tokenizer = lambda *given: Slow(made(*given).description)
    prepare(DataConfig.model_validate_json({config.model_dump_json()!r}), Path({str(tmp_path / "cache")!r}))
"""
    (tmp_path / "slow.py").write_text(program)
    killed = subprocess.Popen([sys.executable, str(tmp_path / "slow.py")], stderr=subprocess.PIPE)
    directory, deadline = tmp_path / "cache" / "shards", time.monotonic() + 60
    while len([path for path in directory.glob("*") if path.suffix != ".partial"]) < 3:
        assert killed.poll() is None and time.monotonic() < deadline, killed.stderr.read()
        time.sleep(0.005)
    children = [int(child) for child in Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()]
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a process outlives its parent"
        time.sleep(0.01)
    before = {name: when for name, when in shards(tmp_path / "cache").items() if not name.endswith(".partial")}
    assert 3 <= len(before) < 6 and not list((tmp_path / "cache").glob("prepared-*"))
    resumed = prepare(config, tmp_path / "cache")
    assert len(shards(tmp_path / "cache")) == 6 and before.items() <= shards(tmp_path / "cache").items()
    assert content(resumed) == content(prepare(DataConfig(**options), tmp_path / "straight"))


def test_a_full_disk_is_one_sentence_and_loses_nothing(options, tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, hard))  # held-out shards fit, training shards do not
    try:
        with pytest.raises(DataError, match=r"the disk is full; free disk space .*Finished shards are kept"):
            prepare(DataConfig(**options), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    before = shards(tmp_path)
    assert len(before) == 2  # and nothing unfinished takes room
    prepare(DataConfig(**options), tmp_path)
    assert before.items() <= shards(tmp_path).items() and len(shards(tmp_path)) == 6


def test_a_cache_that_cannot_be_made_is_refused(options, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"could not be prepared in .*: .*; fix that or set data\.cache"):
        prepare(DataConfig(**options), tmp_path / "file" / "cache")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_damaged_text_is_named_by_every_reader(options, tmp_path, workers: int, tokenizer: str):
    shutil.copytree(options["path"], tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("*.zst"):
        path.write_bytes(path.read_bytes()[:-10])
    config = DataConfig(**{**options, "path": str(tmp_path / "copy"), "workers": workers, "tokenizer": tokenizer})
    with pytest.raises(DataError, match=r"example_\w+\.jsonl\.zst is incomplete"):
        prepare(config, tmp_path / "cache")


def test_the_names_of_built_in_sources_in_a_cache_stay(options):
    config = DataConfig(**options)
    assert config.code is None and config.hash == config.options_hash


def test_a_damaged_shard_is_refused_and_made_anew_when_deleted(options, tmp_path):
    config = DataConfig(**options)
    whole = content(prepare(config, tmp_path))
    path = next((tmp_path / "shards").glob("*/tokens.npy"))
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="is damaged; remove that directory and run again"):
        prepare(config, tmp_path)
    shutil.rmtree(path.parent)
    assert content(prepare(config, tmp_path)) == whole


def test_a_shard_that_cannot_be_read_is_not_called_damaged(options, tmp_path, monkeypatch):
    """Nobody should delete a shard for want of a permission."""
    prepare(DataConfig(**options), tmp_path / "cache")

    def forbidden(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("basecap.data.shards.file_digest", forbidden)
    with pytest.raises(DataError, match=r"Permission denied .*tokens\.npy.; fix that") as caught:
        prepare(DataConfig(**options), tmp_path / "cache")
    assert "delete" not in str(caught.value)


@pytest.mark.parametrize("name", ["prepared-*.json", "tokenizer-*.json"])
def test_damaged_descriptions_are_refused_and_made_anew_when_deleted(options, tmp_path, name: str):
    config = DataConfig(**options)
    whole = content(prepare(config, tmp_path))
    (path,) = tmp_path.glob(name)
    for damaged in (path.read_text()[:-30], path.read_text().replace('"tokenizer"', '"x"').replace("endof", "end_of_")):
        path.write_text(damaged)
        with pytest.raises((DataError, ConfigError), match=r"damaged|not a description"):
            prepare(config, tmp_path)
    path.unlink()
    assert content(prepare(config, tmp_path)) == whole


def test_domains_without_enough_text_are_refused(options, tmp_path):
    with pytest.raises(DataError, match="domain 'github' has no test documents; add"):
        prepare(DataConfig(**{**options, "ood": ["github"]}), tmp_path)
    with pytest.raises(DataError, match="domain 'book' has no train documents; add text or leave the domain out"):
        prepare(DataConfig(**{**options, "train": ["c4", "book"]}), tmp_path)
    with pytest.raises(DataError, match=r"seq_len = 9000 is longer than the whole text of domain 'arxiv' \(\d+ tokens"):
        prepare(DataConfig(**{**options, "seq_len": 9000}), tmp_path)
    with pytest.raises(DataError, match=r"of at most 50 tokens, a 10th of data\.max_test_tokens = 500; raise it"):
        prepare(DataConfig(**options, max_test_tokens=500), tmp_path)


def test_short_documents_of_unseen_domains_are_left_out(options, tmp_path):
    whole = prepare(DataConfig(**options), tmp_path)
    (domain,) = options["ood"]
    every = whole.documents("test", domain)
    sizes = sorted(len(every.tokens(index)) for index in range(len(every)))
    config = DataConfig(**options, min_ood_tokens=sizes[len(sizes) // 2])
    long = prepare(config, tmp_path)
    kept = sum(size for size in sizes if size >= config.min_ood_tokens)
    assert 0 < long.documents("test", domain).total_tokens == kept < every.total_tokens
    for trained in config.train:
        assert long.documents("test", trained).total_tokens == whole.documents("test", trained).total_tokens
    with pytest.raises(DataError, match=r"no test documents of at least 99999 tokens; lower data\.min_ood_tokens"):
        prepare(DataConfig(**options, min_ood_tokens=99_999), tmp_path)


def test_unknown_domains_and_splits_are_refused(options, tmp_path):
    prepared = prepare(DataConfig(**options), tmp_path)
    with pytest.raises(ConfigError, match="no domain 'arxv': did you mean 'arxiv'"):
        prepared.documents("test", "arxv")
    with pytest.raises(ConfigError, match="unknown split 'tests': did you mean 'test'"):
        prepared.documents("tests", "arxiv")
    with pytest.raises(DataError, match="'arxiv' has no train documents"):
        prepared.documents("train", "arxiv")


def test_inspect_counts(options, tmp_path):
    rows = inspect(prepare(DataConfig(**options), tmp_path))
    assert len(rows) == 8 and [row["role"] for row in rows].count("ood") == 2
    (row,) = [row for row in rows if (row["domain"], row["split"]) == ("c4", "test")]
    assert row["documents"] == 8 and row["bytes"] == row["tokens"] and row["bytes per token"] == 1.0


def test_clusters_are_the_labels_that_records_carry(tmp_path):
    records = [{"text": words("c4", number), "meta": {"site": {"id": number % 7}}} for number in range(200)]
    write_lines(tmp_path / "c4.jsonl", records)
    write_lines(tmp_path / "arxiv.jsonl", [{"text": words("arxiv", number)} for number in range(60)])
    options = {"source": "jsonl", "path": str(tmp_path), "tokenizer": "bytes", "seq_len": 32, "workers": 1}
    config = DataConfig(**options, train=["c4"], ood=["arxiv"], cluster="meta.site.id", overlap=None)
    prepared = prepare(config, tmp_path / "cache")
    site = {record["text"]: record["meta"]["site"]["id"] for record in records}
    held = prepared.documents("test", "c4")
    texts = [prepared.tokenizer.decode(held.tokens(index)) for index in range(len(held))]
    sites = {site[text] for text in texts}
    assert held.clusters.dtype == np.int64 and held.clusters.max() + 1 == len(sites) > 3
    assert len({(site[text], cluster) for text, cluster in zip(texts, held.clusters, strict=True)}) == len(sites)
    bare = prepared.documents("test", "arxiv")
    assert bare.clusters.tolist() == list(range(len(bare)))
    found = {(row["domain"], row["split"]): (row["clusters"], row["without cluster"]) for row in inspect(prepared)}
    assert found["c4", "test"] == (len(sites), 0) and found["arxiv", "test"] == (len(bare), len(bare))
    assert found["c4", "train"] == (None, None)
    with pytest.raises(DataError, match=r"no held-out document has the key .* 'meta\.site\.ix': did you mean 'meta\.s"):
        prepare(config.model_copy(update={"cluster": "meta.site.ix"}), tmp_path / "cache")
    (tmp_path / "notes").mkdir()
    for number in range(60):
        (tmp_path / "notes" / f"{number}.txt").write_text(words("c4", number))
    config = DataConfig(**{**options, "source": "text"}, train=["notes"], cluster="path", overlap=None)
    with pytest.raises(DataError, match=r"is in a folder of its domain, as data\.cluster = 'path' needs; leave it out"):
        prepare(config, tmp_path / "cache")


def test_copies_of_a_held_out_document_count_once(tmp_path):
    records = [{"text": words("arxiv", number), "site": number % 5} for number in range(60)]
    write_lines(tmp_path / "c4.jsonl", [{"text": words("c4", number)} for number in range(100)])
    write_lines(tmp_path / "arxiv" / "1.jsonl", records)
    options = {"source": "jsonl", "path": str(tmp_path), "tokenizer": "bytes", "seq_len": 32, "workers": 1}
    config = DataConfig(**options, train=["c4"], ood=["arxiv"], overlap=0.9, cluster="site")
    once = prepare(config, tmp_path / "once")
    write_lines(tmp_path / "arxiv" / "2.jsonl", [{**record, "site": 7} for record in records[::-1]])
    trained = [text for number in range(20) if split_of(text := words("c4", number)) == "train"]
    write_lines(tmp_path / "arxiv" / "3.jsonl", records[:30] + [{"text": text} for text in trained])
    config = config.model_copy(update={"workers": 2})
    for prepared in (prepare(config, tmp_path / "more"), prepare(config, tmp_path / "more")):
        for split in ("validation", "test"):
            held, alone = prepared.documents(split, "arxiv"), once.documents(split, "arxiv")
            read, expected = (
                sorted(found.tokens(number).tobytes() for number in range(len(found))) for found in (held, alone)
            )
            assert read == expected and len(held.copies) >= len(held)
            assert held.total_tokens == alone.total_tokens == held.sizes.sum() and len(alone.copies) == 0
        rows = {(row["domain"], row["split"]): row for row in inspect(prepared)}
        assert rows["arxiv", "test"]["copies"] == len(prepared.documents("test", "arxiv").copies)
        assert rows["arxiv", "test"]["left out"] + rows["arxiv", "validation"]["left out"] == len(trained)
        assert rows["c4", "train"]["copies"] is None
