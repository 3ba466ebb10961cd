"""Measure how fast text becomes tokens: each stage in one process, and a whole preparation with its memory.

Run `python -m benchmarks.preparation_speed FILES... [--megabytes 1000] [--json FILE]`; FILES are of records, such as
SlimPajama's, which are repeated with changed words until there are so many megabytes in 16 files. `processor` is what
the processes used; `seconds` is the time that passed, which other programs on the machine lengthen: `load` is the
number of running processes before. `least_tokens_per_s` is what idle cores reach at least: the workers share their
part, and the main process does its part alone, as if its threads took turns.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from basecap.data import DataConfig, Tokenizer, prepare
from basecap.data.shards import Shard, write_shard
from basecap.data.sources import Document, split_of
from basecap.data.sources._lines import read_records
from basecap.data.tokenizer import train_bpe

#: Files of the text, entries of the vocabulary, characters that train the tokenizer, and of a stage.
FILES, VOCABULARY, TRAINED, STAGE = 16, 32_000, 20_000_000, 5_000_000
#: Held-out tokens of a domain and split.
HELD_OUT = 1_000_000


def write_text(given: list[Path], folder: Path, megabytes: int) -> None:
    """Write FILES files of records: the documents of `given`, again and again with another word in eight after once."""
    source, size, again = random.Random(0), megabytes * 1_000_000 // FILES, False
    names = [folder / ("other" if number % 8 == 7 else "text") / f"{number}.jsonl" for number in range(FILES)]
    with ExitStack() as held:
        files = [held.enter_context(name.open("w")) for name in names]
        while files:
            for text in (record["text"] for path in given for _, record in read_records(path)):
                words = text.split(" ")
                if again:  # no passage of 13 words is the same
                    words[::8] = source.choices(words, k=len(words[::8]))
                if not files:
                    return
                file = source.choice(files)
                file.write(json.dumps({"text": " ".join(words)}) + "\n")
                if file.tell() >= size:
                    files.remove(file)
            again = True


def measured(texts: list[str], work: Callable[[], object]) -> dict[str, float]:
    """Do something with texts; return seconds of processor and megabytes of text per second."""
    began = time.process_time()
    work()
    seconds = time.process_time() - began
    return {"seconds": seconds, "megabytes_per_s": sum(len(text.encode()) for text in texts) / 1e6 / seconds}


def stages(folder: Path, tokenizer: Tokenizer) -> dict[str, dict[str, float]]:
    """Measure the stages of preparing the beginning of one file, in this process."""
    path, texts, size = folder / "text" / "0.jsonl", [], 0
    reading = read_records(path)
    began = time.process_time()
    while size < STAGE:
        texts.append(next(reading)[1]["text"])
        size += len(texts[-1])
    read = time.process_time() - began
    few = texts[: max(1, len(texts) // 20)]
    faster = Tokenizer(tokenizer.description)
    found = {
        "read": {"seconds": read, "megabytes_per_s": sum(len(text.encode()) for text in texts) / 1e6 / read},
        "split by hash": measured(texts, lambda: [split_of(text) for text in texts]),
        "encode with tokenizers": measured(few, lambda: [tokenizer.encode_document(text) for text in few]),
    }
    if faster.use_gigatoken(texts) is None and faster.faster:
        faster.encode_document(texts[0])
        found["encode with gigatoken"] = measured(texts, lambda: [faster.encode_document(text) for text in texts])

    def documents() -> Iterator[Document]:
        return (Document("text", "train", text) for text in texts)

    limits = {("text", "train"): None}
    found["encode and write a shard"] = measured(
        texts, lambda: write_shard(folder / "shard", documents(), faster, limits, {}, {})
    )
    return found


def prepared(folder: str, tokenizer: str, workers: int) -> dict[str, float]:
    """Prepare the text of a folder with so many workers; return its size, time and memory."""
    config = DataConfig(
        source="jsonl",
        path=folder,
        tokenizer=tokenizer,
        train=("text",),
        ood=("other",),
        seq_len=2048,
        workers=workers,
        max_test_tokens=HELD_OUT,
    )
    began, before = time.perf_counter(), time.process_time()
    found = prepare(config, Path(folder) / "cache")
    seconds = time.perf_counter() - began
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    main, spread = (usage.ru_utime + usage.ru_stime - start for usage, start in ((own, before), (others, 0.0)))
    shards = [Shard(path).about["groups"].values() for path in sorted((Path(folder) / "cache" / "shards").iterdir())]
    tokens = sum(group["tokens"] for groups in shards for group in groups)
    return {
        "tokens": tokens,
        "training_tokens": found.train.tokens,
        "workers": workers,
        "seconds": seconds,
        "processor_seconds_main": main,
        "processor_seconds_workers": spread,
        "tokens_per_s": tokens / seconds,
        "tokens_per_processor_s": tokens / (main + spread),
        "least_tokens_per_s": tokens / (main + spread / workers),
        "peak_mib_main": own.ru_maxrss // 1024,
        "peak_mib_worker": others.ru_maxrss // 1024,
    }


def main() -> None:
    """Print the measurements and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="basecap-preparation-") as name:
        folder = Path(name)
        for domain in ("text", "other"):
            (folder / domain).mkdir()
        write_text(given.files, folder, given.megabytes)
        beginning = (record["text"] for path in sorted((folder / "text").iterdir()) for _, record in read_records(path))
        tokenizer = train_bpe(first_characters(beginning, TRAINED), VOCABULARY)
        (folder / "tokenizer.json").write_text(tokenizer.description)
        found = {
            "load": os.getloadavg()[0],
            "cores": os.cpu_count(),
            "megabytes": given.megabytes,
            "vocabulary": tokenizer.vocab_size,
            "packages": {name: version(name) for name in ("tokenizers", "gigatoken", "numpy", "zstandard")},
            "stages": stages(folder, tokenizer),
        }
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            job = pool.submit(prepared, str(folder), str(folder / "tokenizer.json"), 2)
            found["preparation"] = job.result()
    text = json.dumps(found, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")


def first_characters(texts: Iterator[str], count: int) -> Iterator[str]:
    """Yield texts until they have `count` characters."""
    for text in texts:
        if count <= 0:
            return
        count -= len(text)
        yield text


if __name__ == "__main__":
    main()
