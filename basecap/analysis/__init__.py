"""Statistics over records: reads files, never a model."""

from basecap.analysis.results import analyse

__all__ = ["analyse"]
