"""What the command line says about invalid arguments."""

import re
from collections.abc import Sequence
from typing import Any

import typer

from basecap.errors import ConfigError

#: Raised by typer for invalid arguments. Some releases take this class from click, others define their own.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

#: Options of earlier versions and what replaced them.
RENAMED = {"--svg": "--figures svg"}


def refuse_empty(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an empty argument, as a path it would be the current directory; not for an empty prompt."""
    before = ""
    for argument in arguments if arguments[:1] != ["generate"] else ():
        option, equals, value = argument.partition("=")
        if not argument or (option.startswith("--") and equals and not value):
            place = f"the value of {option or before}" if (option or before).startswith("--") else "an argument"
            raise ConfigError(f"{place} is empty; give one, or leave it out (a variable of the shell may be unset).")
        before = argument


def usage_message(error: Any, called: str = "basecap") -> str:
    """Return typer's message about invalid arguments as one sentence, empty when it printed the help instead.

    `called` is the command, which an error of the parser does not know.
    """
    message = error.format_message().replace(": Input should", ": should", 1).replace(": Value error, ", ": ", 1)
    message = re.sub(r" \(Possible options: (.*)\)$", r"; did you mean \1?", message[:1].lower() + message[1:])
    message = message.replace(". Did you mean", "; did you mean")
    for old, new in RENAMED.items():
        message = re.sub(rf"^(no such option: {old})\b.*", rf"\1; write {new}", message)
    message = re.sub(r"^got unexpected extra argument\(?s?\)? \((.*)\)$", r"unexpected argument \1", message)
    if python := re.search(r"^unexpected argument (?:.* )?(\S+\.py)\b", message):
        message += f"; write --plugin {python[1]}"
    elif message.startswith("unexpected argument"):
        known = {option for parameter in error.ctx.command.params for option in parameter.opts}
        message += "".join(f"; write {option} NAME" for option in ("--mixer", "--only") if option in known)
    command = error.ctx.command_path if error.ctx else called
    return message and f"{message.rstrip('.')} (see `{command} --help`)."
