"""Source `jsonl`: a file or folder of records per domain, split by the hash of each text."""

from collections.abc import Iterator, Sequence
from typing import Any

from basecap.data.sources._contract import Document, Part, Source, source
from basecap.data.sources._lines import ENDINGS, SUFFIXES, keys_of, read_records, record_files, refuse_pairs


@source("jsonl")
class JsonLines(Source):
    """`path/<domain>.jsonl`, .jsonl.zst, .jsonl.gz, .json.gz or .parquet, or any such files below `path/<domain>/`."""

    def parts(self) -> list[Part]:
        """Return one part per file; raises DataError for a domain without files."""
        directory = self.directory()
        found = []
        for domain in (*self.config.train, *self.config.ood):
            single = [directory / f"{domain}{suffix}" for suffix in SUFFIXES]
            files = refuse_pairs([path for path in single if path.is_file()], SUFFIXES) + record_files(
                directory / domain
            )
            if not files:
                named = (path for ending in SUFFIXES for path in directory.rglob(f"*{ending}"))
                paths = [path.relative_to(directory) for path in named if path.is_file()]
                needs = f"{domain} with the ending {ENDINGS}, or such files below {domain}/"
                # A folder, such as a.parquet/ with the parts of a set, is a domain of that name.
                known = {path.parts[0] if path.parts[1:] else path.name.partition(".")[0] for path in paths}
                raise self.missing(domain, needs, known - {""})
            found += [Part(f"{domain}/{self.name_of(path)}", (path,)) for path in files]
        return found

    def read(self, part: Part) -> Iterator[Document]:
        """Yield one document per record."""
        domain = part.name.partition("/")[0]
        for record in self._records(part, self.cluster_keys):
            yield Document(domain, self.split_of(domain, record["text"]), record["text"], self.record_cluster(record))

    def keys(self, part: Part) -> tuple[str, ...]:
        """Return the keys of the part's first record."""
        return keys_of(next(self._records(part), {}))

    def _records(self, part: Part, keys: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        return (record for path in part.paths for _, record in read_records(path, keys))
