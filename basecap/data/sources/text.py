"""Source `text`: a folder of text files per domain, split by the hash of each text."""

import io
from collections.abc import Iterator
from pathlib import Path

from basecap.data.sources._contract import Document, Part, Source, files_below, source
from basecap.data.sources._lines import LONGEST, refuse_pairs
from basecap.errors import DataError
from basecap.system.foreign import chunks, decompressed, read_file

#: Maximum size in bytes of a group of files, so that a million small files do not become a million shards.
PART_BYTES = 32 << 20

#: Endings of compressed files, and of those that are text.
COMPRESSED, COMPRESSED_TEXT = (".gz", ".zst"), (".txt.gz", ".txt.zst")


@source("text")
class TextFiles(Source):
    """Every file below `path/<domain>/` is one document in UTF-8, also .txt.gz and .txt.zst, but no hidden file."""

    has_records = False

    def parts(self) -> list[Part]:
        """Return the files of each domain in groups of limited size; raises DataError for a domain without files."""
        directory = self.directory()
        found = []
        for domain in (*self.config.train, *self.config.ood):
            folder = directory / domain
            if not folder.is_dir():
                known = (path.name for path in directory.iterdir() if path.is_dir())
                raise self.missing(domain, f"a folder {domain}/ of text files", known)
            group: list[Path] = []
            size = 0
            for path in refuse_pairs(files_below(folder), COMPRESSED):
                if group and size + path.stat().st_size > PART_BYTES:
                    found.append(Part(self.name_of(group[0]), tuple(group)))
                    group, size = [], 0
                group.append(path)
                size += path.stat().st_size
            if not group:
                raise DataError(f"domain {domain!r} is empty: {folder} has no files; put text files there.")
            found.append(Part(self.name_of(group[0]), tuple(group)))
        return found

    def read(self, part: Part) -> Iterator[Document]:
        """Yield one document per file."""
        domain = part.name.partition("/")[0]
        for path in part.paths:
            try:
                # Windows may write a byte order mark and carriage returns.
                text = io.TextIOWrapper(io.BytesIO(_content(path)), encoding="utf-8-sig").read()
            except UnicodeDecodeError as error:
                raise DataError(f"{path} is not text in UTF-8 ({error.reason}); convert or remove it.") from error
            place = path.relative_to(self.directory() / domain)
            yield Document(domain, self.split_of(domain, text), text, self.path_cluster(place))


def _content(path: Path) -> bytes:
    """Return the content of a file, decompressed; raises DataError when it is too long."""
    if not path.name.endswith(COMPRESSED_TEXT):
        return read_file(path, LONGEST)
    content = bytearray()
    for chunk in decompressed(path, chunks(path)):
        content += chunk
        if len(content) > LONGEST:
            raise DataError(f"{path} has more than {LONGEST >> 20} MiB; split the document or remove the file.")
    return bytes(content)
