"""Where text comes from: one file per source."""

from basecap.data.sources._contract import SOURCES, Document, Part, Source, source

__all__ = ["SOURCES", "Document", "Part", "Source", "source"]
