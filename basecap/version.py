"""The version of basecap."""

__version__ = "0.1.0"
