"""Source `hub`: a dataset of the Hugging Face hub with a configuration per domain, or a dataset per domain."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from basecap.data.sources import _hub
from basecap.data.sources._contract import PLACEHOLDER, Document, Part, Source, source
from basecap.data.sources._lines import keys_of
from basecap.errors import ConfigError


class HubFiles(Source):
    """Text of the hub, or of a copy of it, read file by file: a part is named DOMAIN/FILE."""

    @abstractmethod
    def dataset(self, domain: str) -> str:
        """Return the dataset, or directory, with the files of a domain."""

    def domain_of(self, part: Part, place: str, record: Mapping[str, Any]) -> str:
        """Return the domain of a record of a part."""
        return part.name.partition("/")[0]

    def read(self, part: Part) -> Iterator[Document]:
        """Yield one document per record."""
        for place, record in self.records(part, self.record_keys):
            domain, text = self.domain_of(part, place, record), record["text"]
            yield Document(domain, part.split or self.split_of(domain, text), text, self.record_cluster(record))

    @property
    def record_keys(self) -> tuple[str, ...]:
        """The dotted keys of records that are used beside the text."""
        return self.cluster_keys

    def keys(self, part: Part) -> tuple[str, ...]:
        """Return the keys of the part's first record."""
        return keys_of(next((record for _, record in self.records(part, None)), {}))

    def fingerprints(self, part: Part) -> dict[str, str]:
        """Return the commit of the dataset, or the hash of the file."""
        domain, _, file = part.name.partition("/")
        return {part.name: _hub.fingerprint(self.dataset(domain), file)}

    def records(self, part: Part, keys: tuple[str, ...] | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (location, record) for each record of a part; see `records_of`."""
        domain, _, file = part.name.partition("/")
        return _hub.records(self.dataset(domain), file, keys)


@source("hub")
class HubDatasets(HubFiles):
    """Any set of the hub: data.hub is OWNER/NAME with a configuration per domain, or OWNER/...{domain}... for many."""

    reads = ("hub", "max_files")

    def dataset(self, domain: str) -> str:
        """Return the dataset of a domain; raises ConfigError when `data.hub` is not set."""
        if self.config.hub is None:
            raise ConfigError("source 'hub' needs a dataset; give it with --set data.hub=OWNER/NAME.")
        return self.config.hub.replace(PLACEHOLDER, domain)

    def parts(self) -> list[Part]:
        """Return one part per file of each domain."""
        found = []
        for domain in (*self.config.train, *self.config.ood):
            name = self.dataset(domain)
            configuration = domain if name == self.config.hub else None
            found += _hub.parts_of(self.config, domain, _hub.split_files(name, configuration))
        return found

    def download(self) -> str | None:
        """Name the datasets."""
        names = dict.fromkeys(self.dataset(domain) for domain in (*self.config.train, *self.config.ood))
        return _hub.description(self.config, [(name, None) for name in names])
