"""Sources for sets that are on the Hugging Face hub: one YAML file of `sets/` each.

A file has `summary`, `licence`, `read` (where its facts were read), `hub` (the dataset, unless each domain has one of
its own) and `domains`; `also` adds some of other sets. A domain has `files` (a glob; default: all),
`size` as published, and its `licence` if the domains differ. `splits` are the globs of the set's own splits. Where the
files hold all domains, `key` is the dotted key of a record, and `label` its value for a domain.

The set is streamed from the hub, or read from a copy: `data.path` is the directory of the dataset, or one that holds a
directory per dataset, called as on the hub without the owner.
"""

from collections.abc import Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from basecap.data.sources import _hub
from basecap.data.sources._contract import Part, source, value_of
from basecap.data.sources.hub import HubFiles
from basecap.errors import DataError
from basecap.system.yaml_text import parse_yaml


class Preset(HubFiles):
    """A set whose domains are known; `content` is that of its file."""

    reads = ("path", "max_files")
    content: ClassVar[dict[str, Any]]

    @classmethod
    def about(cls, domain: str) -> dict[str, str]:
        """Return the summary, dataset, size and licence of a domain, and where that was read."""
        found = {"size": "size not known", **cls.content, **cls.content["domains"][domain]}
        found = {key: found[key] for key in ("hub", "size", "licence", "summary", "read")}
        return {**found, "set": found["summary"], "summary": f"{found['hub']}: {found['size']}; {found['licence']}"}

    def dataset(self, domain: str) -> str:
        """Return the dataset of a domain on the hub, or its copy below `data.path`."""
        hub = self.about(domain)["hub"] if domain in self.known_domains else self.content["hub"]
        if self.config.path is None:
            return hub
        directory = self.directory()
        return str(directory if "hub" in self.content else directory / PurePosixPath(hub).name)

    def parts(self) -> list[Part]:
        """Return one part per file; raises DataError for a domain without files."""
        if "key" in self.content:  # every file has all domains
            return self._parts("all", "*")
        entries = {domain: self.content["domains"][domain] for domain in (*self.config.train, *self.config.ood)}
        return [part for name, entry in entries.items() for part in self._parts(name, entry.get("files", "*"))]

    def _parts(self, domain: str, pattern: str) -> list[Part]:
        name = self.dataset(domain)
        if self.config.path is not None and not Path(name).is_dir():
            raise DataError(f"{name} is not a directory; put a copy of {self.about(domain)['hub']} there.")
        named = [file for file in _hub.files(name) if fnmatch(file, pattern)]
        splits = self.content.get("splits", {"all": "*"})
        groups = {split: [file for file in named if fnmatch(file, glob)] for split, glob in splits.items()}
        if missing := [split for split, files in groups.items() if not files]:
            what = "" if missing == ["all"] else f" of the split {' and '.join(missing)}"
            raise DataError(f"{name} has no files {pattern}{what}; check the copy of the dataset.")
        return _hub.parts_of(self.config, domain, groups)

    def domain_of(self, part: Part, place: str, record: Mapping[str, Any]) -> str:
        """Return the domain of a record: that of its file, or the one with its label."""
        key = self.content.get("key")
        if key is None:
            return super().domain_of(part, place, record)
        label = value_of(record, key)
        for domain, entry in self.content["domains"].items():
            if entry["label"] == label:
                return domain
        labels = ", ".join(entry["label"] for entry in self.content["domains"].values())
        raise DataError(f"{place}: {key} is {label!r}; it should be one of {labels}.")

    @property
    def record_keys(self) -> tuple[str, ...]:
        """The key of the label and that of `data.cluster`."""
        return (*self.cluster_keys, *([self.content["key"]] if "key" in self.content else []))

    def download(self) -> str | None:
        """Name the datasets with their sizes, None where a copy is read."""
        if self.config.path is not None:
            return None
        found = [self.about(domain) for domain in (*self.config.train, *self.config.ood)]
        return _hub.description(self.config, [(entry["hub"], entry["size"]) for entry in found])


@cache
def _content(file: Path) -> dict[str, Any]:
    """Return the content of a set's file, with the domains of other sets that it adds to its own."""
    content = parse_yaml(file.read_bytes())
    for other, domains in content.get("also", {}).items():
        found = _content(file.with_name(f"{other}.yaml"))
        shared = {key: found[key] for key in ("summary", "licence", "read")}
        content["domains"] |= {domain: {**shared, **found["domains"][domain]} for domain in domains}
    return content


def _register(file: Path) -> None:
    found = _content(file)

    @source(file.stem)
    class _Set(Preset):
        __doc__ = found["summary"]
        content = found
        known_domains = tuple(found["domains"])


for _file in sorted((Path(__file__).parent / "sets").glob("*.yaml")):
    _register(_file)
