"""Source `slimpajama`: a directory in SlimPajama's layout, or a streamed dataset of the Hugging Face hub.

The directory has `train/`, `validation/` and `test/`, each with any number of `*.jsonl.zst` files; a record is
`{"text": ..., "meta": {"redpajama_set_name": "RedPajamaC4"}}`, and each file has records of all domains.

The additional domain `automathtext` is read from `automathtext/` in the same directory: AutoMathText as published
(arXiv 2402.07625), any number of `*.jsonl` or `*.jsonl.zst` files, split by the hash of each text. Beside a dataset of
the hub it is `math-ai/AutoMathText`, read file by file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from basecap.data.sources import _hub
from basecap.data.sources._contract import SPLITS, Document, Part, Source, source
from basecap.data.sources._lines import ENDINGS, keys_of, read_records, record_files
from basecap.errors import DataError

SETS = {
    f"RedPajama{name}": name.lower()
    for name in ("CommonCrawl", "C4", "Github", "Book", "ArXiv", "Wikipedia", "StackExchange")
}

#: A domain that SlimPajama does not have, for tests on long documents unlike any training domain.
EXTRA_DOMAIN = "automathtext"
#: Stands for the other domains, which share files, in the names of parts of a dataset of the hub.
WHOLE = "slimpajama"
#: The dataset of the hub that it is published as.
EXTRA_HUB = "math-ai/AutoMathText"


@source("slimpajama")
class SlimPajama(Source):
    """SlimPajama-627B, or other text in its layout."""

    known_domains = (*SETS.values(), EXTRA_DOMAIN)
    reads = ("path", "hub", "max_files")

    def parts(self) -> list[Part]:
        """Return one part per file of the directory or of the dataset; raises ConfigError or DataError."""
        wanted = EXTRA_DOMAIN in (*self.config.train, *self.config.ood)
        if self.config.hub is not None:
            splits = _hub.split_files(self.config.hub)
            if missing := [split for split in SPLITS if split not in splits]:
                raise DataError(f"dataset {self.config.hub!r} has no split {missing[0]}; check data.hub.")
            extra = {"all": _hub.files(self._extra_hub()) if wanted else []}
            return _hub.parts_of(self.config, WHOLE, splits) + _hub.parts_of(self.config, EXTRA_DOMAIN, extra)
        directory = self.directory()
        found = []
        for split in SPLITS:
            files = record_files(directory / split)
            if not files:
                raise DataError(
                    f"{directory / split} has no file that ends in {ENDINGS}; set data.path to the directory that "
                    "contains train/, validation/ and test/."
                )
            found += [Part(self.name_of(path), (path,), split) for path in files]
        if wanted:
            files = record_files(directory / EXTRA_DOMAIN)
            if not files:
                what = f"{directory / EXTRA_DOMAIN} has no file that ends in {ENDINGS}"
                raise DataError(f"{what}; put AutoMathText there.")
            found += [Part(self.name_of(path), (path,)) for path in files]
        return found

    def read(self, part: Part) -> Iterator[Document]:
        """Yield one document per record."""
        for place, record in self._records(part):
            if _is_extra(part):
                domain, split = EXTRA_DOMAIN, self.split_of(EXTRA_DOMAIN, record["text"])
            else:
                domain, split = _domain(place, record), part.split or "train"
            yield Document(domain, split, record["text"], self.record_cluster(record))

    def keys(self, part: Part) -> tuple[str, ...]:
        """Return the keys of the part's first record."""
        return keys_of(next((record for _, record in self._records(part)), {}))

    def fingerprints(self, part: Part) -> dict[str, str]:
        """Return the hash of the file, or the commit of the dataset."""
        if self.config.hub is None:
            return super().fingerprints(part)
        name, file = self._file_of(part)
        return {f"{name}/{file}": _hub.fingerprint(name, file)}

    def _records(self, part: Part) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.config.hub is None:
            return (item for path in part.paths for item in read_records(path))
        return _hub.records(*self._file_of(part), None)

    def download(self) -> str | None:
        """Name the datasets of the hub."""
        if self.config.hub is None:
            return None
        extra = [self._extra_hub()] if EXTRA_DOMAIN in (*self.config.train, *self.config.ood) else []
        return _hub.description(self.config, [(name, None) for name in (self.config.hub, *extra)])

    def _file_of(self, part: Part) -> tuple[str, str]:
        """Return the dataset and the file of a part that is not local."""
        domain, _, file = part.name.partition("/")
        return self._extra_hub() if domain == EXTRA_DOMAIN else self.config.hub or "", file

    def _extra_hub(self) -> str:
        """Return the dataset of the additional domain; beside a local dataset it is a directory, as without the hub."""
        local = Path(self.config.hub or "")
        return str(local / EXTRA_DOMAIN) if local.is_dir() else EXTRA_HUB


def _is_extra(part: Part) -> bool:
    return part.name.startswith(f"{EXTRA_DOMAIN}/")


def _domain(place: str, record: dict[str, Any]) -> str:
    meta = record.get("meta")
    name = meta.get("redpajama_set_name") if isinstance(meta, dict) else None
    if name not in SETS:
        raise DataError(f"{place}: meta.redpajama_set_name is {name!r}; it should be one of {', '.join(SETS)}.")
    return SETS[name]
