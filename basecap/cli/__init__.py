"""The command line. Heavy modules are imported inside the commands: `--help` takes a fraction of a second."""

from basecap.cli.commands import app as app
from basecap.cli.commands import main as main
