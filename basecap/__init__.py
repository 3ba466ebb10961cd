"""basecap: does a sequence-mixing architecture keep the base capabilities of a Transformer?"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from basecap.errors import BasecapError
from basecap.version import __version__

if TYPE_CHECKING:  # importing these takes seconds, which `import basecap` and `basecap --help` must not
    from basecap.api import Study, TrainedModel

__all__ = ["BasecapError", "__version__", "load", "open"]


def open(directory: str | Path) -> "Study":
    """Open a study that `basecap run` wrote, for the tables, figures and models of its report.

    It is read once, when it is first asked for a table, a figure or its findings: while it runs, open it again to see
    more. To see gaps is a look at the study, as is its report: seeds that are added later count as added after a look.

    Args:
        directory: of the study, such as "runs/quickstart".

    Raises:
        ConfigError: the directory holds no study.
        DataError: its records cannot be read.
    """
    from basecap.api import open_study

    return open_study(directory)


def load(
    run: str | Path, *, step: int | None = None, device: str | None = None, plugins: Sequence[str | Path] = ()
) -> "TrainedModel":
    """Return the trained model of a run with its tokenizer: it generates and scores text, and gives logits.

    Args:
        run: directory of the run, DIR/runs/NAME-sSEED.
        step: the training step of stored weights; None: the end of the run.
        device: "cpu", "cuda" or "cuda:N"; None: a GPU if there is one.
        plugins: Python files with mixers of your own, as after `--plugin`.

    Raises:
        ConfigError: it is not the directory of a run, the run is not finished and no step is given, or what it was
            trained with is not there: its text, its plugin.
        CheckpointError: its weights are missing or damaged.
    """
    from basecap.api import load_run

    return load_run(run, step=step, device=device, plugins=plugins)
