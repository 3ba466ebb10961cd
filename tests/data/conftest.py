"""Made-up text in the layouts that the sources read."""

import gzip
import json
import random
from pathlib import Path

import pytest
import zstandard

WORDS = {
    "commoncrawl": ["river", "bridge", "stone", "walks", "slowly", "and", "then", "home", "the", "a"],
    "c4": ["meeting", "agenda", "item", "über", "next", "and", "then", "room", "the", "a"],
    "arxiv": ["\\alpha", "\\sum", "_{i}", "theorem", "lemma", "proof", "let", "be", "the", "a"],
}
SETS = {"commoncrawl": "RedPajamaCommonCrawl", "c4": "RedPajamaC4", "arxiv": "RedPajamaArXiv"}


def words(domain: str, number: int, count: int = 60) -> str:
    """Return made-up text, the same for the same arguments."""
    source = random.Random(f"{domain}{number}")
    return " ".join(source.choice(WORDS[domain]) for _ in range(count))


def write_lines(path: Path, records: list) -> Path:
    """Write records as lines of JSON, compressed where the name says so, or as rows of a Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(records), path)
        return path
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    compress = {".zst": zstandard.compress, ".gz": gzip.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(content))
    return path


def slimpajama_records(first: int, count: int) -> list[dict]:
    """Return records of three domains, shuffled together."""
    return [
        {"text": words(domain, number), "meta": {"redpajama_set_name": SETS[domain]}}
        for number in range(first, first + count)
        for domain in WORDS
    ]


@pytest.fixture(scope="session")
def slimpajama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory in SlimPajama's layout: 4 training files, 2 held-out ones."""
    root = tmp_path_factory.mktemp("slimpajama")
    for number in range(4):
        path = root / "train" / f"chunk{number % 2}" / f"example_train_{number}.jsonl.zst"
        write_lines(path, slimpajama_records(100 * number, 20))
    for number, split in enumerate(("validation", "test")):
        write_lines(root / split / "chunk1" / "example_holdout_0.jsonl.zst", slimpajama_records(1000 + 100 * number, 8))
    return root


@pytest.fixture
def options(slimpajama: Path) -> dict:
    """Return the data options of a study on it."""
    return {
        "source": "slimpajama",
        "path": str(slimpajama),
        "tokenizer": "bytes",
        "seq_len": 32,
        "train": ["commoncrawl", "c4"],
        "ood": ["arxiv"],
        "workers": 1,
    }
