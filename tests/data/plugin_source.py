"""Plugins that define a source."""

import sys
from pathlib import Path

from basecap.data.sources import SOURCES
from basecap.plugins import PLUGIN, load_plugin


def load_anew(plugin: Path, name: str) -> None:
    """Load a plugin that defines a source as a new process would."""
    sys.modules.pop(PLUGIN + plugin.stem, None)
    SOURCES.names()
    SOURCES._entries.pop(name, None)
    load_plugin(plugin)
