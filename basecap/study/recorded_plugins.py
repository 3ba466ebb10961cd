"""The plugin files of a study's evaluations, tasks and source, as environment.json of its directory names them."""

import shlex
from collections.abc import Callable, Mapping

from basecap.analysis.study_files import EnvironmentFile, parse
from basecap.data.sources import SOURCES
from basecap.errors import ConfigError
from basecap.evals import EVALUATIONS
from basecap.plugins import owner
from basecap.records import StudyRecords
from basecap.tasks import build_task

#: The module that defines a part of a study, by its kind; raises ConfigError for an unknown name.
MODULE_OF: Mapping[str, Callable[[str], str]] = {
    "evaluation": EVALUATIONS.module,
    "task": lambda name: owner(type(build_task(name)).__module__),
    "source": SOURCES.module,
}


def refuse_absent_plugins(records: StudyRecords) -> None:
    """Raise ConfigError when a plugin file that the study of a directory needs is not loaded."""
    path = records.path / "environment.json"
    absent: dict[str, str] = {}
    for kind, files in parse(records.environment(), EnvironmentFile, path).plugins.items():
        for name, file in files.items():
            try:
                MODULE_OF[kind](name)
            except ConfigError:
                absent[f"{kind} {name!r}"] = file
    if absent:
        options = " ".join(f"--plugin {shlex.quote(file)}" for file in dict.fromkeys(absent.values()))
        raise ConfigError(f"{records.path} has the {', '.join(absent)} of a plugin that is not given; add {options}.")
