"""Measure the peak memory of preparing text: one long document, and files of short ones that grow.

Run `OMP_NUM_THREADS=1 python benchmarks/preparation.py DIR [MEGABYTES ...]`; text and shards take some four times the
largest size in DIR, and are removed. Each preparation runs in a process of its own. The exit code is 1 when one
takes more than the limit.
"""

import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from basecap.data import DataConfig, prepare

LIMIT = 1024  # MiB of a process
WORDS = [f"{start}{end}" for start in ("ri", "sto", "brid", "wal", "un") for end in ("ver", "ne", "ge", "ks", "der")]
DOCUMENT = 4_000  # characters of a short document


def write_text(path: Path, megabytes: int, longest: int) -> None:
    """Write records of words and numbers, documents of `longest` characters, so many megabytes in all."""
    source, left = random.Random(0), megabytes * 1_000_000
    with path.open("w") as file:
        while left > 0:
            words, size = [], 0
            while size < min(longest, left):
                words.append(source.choice(WORDS) if source.random() < 0.9 else str(source.randrange(10_000)))
                size += len(words[-1]) + 1
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
            left -= size


def measure(folder: str, tokenizer: str) -> tuple[float, int, int]:
    """Prepare the text of a folder in this process; return seconds of processor, peak MiB and tokens."""
    config = DataConfig(
        source="jsonl", path=folder, tokenizer=tokenizer, vocab=2048, seq_len=128, train=("text",), ood=("other",),
        overlap=None, workers=1,
    )  # fmt: skip
    began = time.process_time()
    prepared = prepare(config, Path(folder) / "cache")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return time.process_time() - began, peak, prepared.train.tokens


def prepared_apart(root: Path, megabytes: int, longest: int, tokenizer: str) -> int:
    """Write text, prepare it in another process, print a line; return that process's peak MiB."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        write_text(Path(folder) / "text.jsonl", megabytes, longest)
        write_text(Path(folder) / "other.jsonl", 1, DOCUMENT)
        with (Path(folder) / "text.jsonl").open("a") as file:  # held-out documents, also where there is one long text
            for number in range(100):
                file.write(json.dumps({"text": f"document {number} of the held-out text " * 20}) + "\n")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            seconds, peak, tokens = pool.submit(measure, folder, tokenizer).result()
    what = "one document" if longest >= megabytes * 1_000_000 else "documents"
    print(f"{megabytes:>6} MB {what:<13} {tokenizer:<6} {seconds:8.1f} s {peak:8,} MiB {tokens:14,} training tokens")
    return peak


def main() -> int:
    """Print a line per text; return the exit code."""
    root, sizes = Path(sys.argv[1]), [int(size) for size in sys.argv[2:]] or [50, 200, 1000]
    peaks = [prepared_apart(root, 50, 50_000_000, tokenizer) for tokenizer in ("bpe", "bytes")]
    peaks += [prepared_apart(root, size, DOCUMENT, "bpe") for size in sizes]
    return int(max(peaks) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
