"""`basecap check`: what it runs and prints, and a guard against plugins that end their process."""

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from basecap.cli.options import AsJson, CheckedDevice, LongLength, NewMixer, Plugins, load_plugins, log
from basecap.cli.output import print_table

if TYPE_CHECKING:
    import torch


def check(
    mixer: Annotated[
        list[str],
        typer.Option(
            "--mixer",
            help="check only this mixer; repeatable (default: mixers and tasks of --plugin, else all mixers and ops)",
        ),
    ] = [],
    thorough: Annotated[
        bool, typer.Option("--thorough", help="also test causality and decoding on a long sequence")
    ] = False,
    length: LongLength = None,
    device: CheckedDevice = None,
    plugin: Plugins = [],
    new: NewMixer = None,
    only_failed: Annotated[bool, typer.Option("--failed", help="print failed checks only")] = False,
    as_json: AsJson = False,
) -> None:
    """Test every mixer and op, or the mixers and tasks of --plugin, against its reference.

    Prints how many checks of each mixer and op passed, then each failed check.
    Exits with code 1 if one fails.
    """
    from basecap.mixers import ARCHITECTURES
    from basecap.system.environment import choose_checked_device, limit_processors
    from basecap.tasks import TASKS
    from basecap.testing.check_all import check_all, covered, failures, folded, registered_by
    from basecap.testing.check_mixer import LONGEST
    from basecap.testing.new_mixer import write_mixer

    if new is not None:
        name = write_mixer(new)
        log(f"{new}: mixer {name!r}; write your own in its place, then basecap check --plugin {new}")
        plugin = [*plugin, new]
    load_plugins(plugin)
    rows: list[dict[str, Any]] = []
    stopped, remarks = False, list[str]()
    names = mixer or registered_by(plugin, ARCHITECTURES)
    tasks = [] if mixer else registered_by(plugin, TASKS)
    longest = length or (LONGEST if thorough else 0)
    chosen = choose_checked_device(device)
    if chosen.type == "cpu":
        limit_processors(1, None)  # threads of models this small wait for each other
    if not (names or tasks):
        _log_card(chosen)
    try:
        remarks = check_all(names, chosen, on_rows=rows.extend, longest=longest, tasks=tasks)
    except KeyboardInterrupt:
        stopped = True
    failed = failures(rows)
    if failed or as_json or not only_failed:
        print_table("checks", failed if only_failed else rows if as_json else folded(rows), as_json)
    how = "." if tasks and not names else f"; {covered(longest)}"
    log(f"{len(rows)} check{'' if len(rows) == 1 else 's'}, {len(failed)} failed{how}")
    _log_kernels(remarks, chosen)
    if stopped:
        log("interrupted: the table shows the checks that ran.")
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def _log_card(device: "torch.device") -> None:
    """Print what a GPU is that no kernel was tuned on, and what each op runs there."""
    from basecap.testing.check_op import unknown_card

    if card := unknown_card(device):
        log(f"{card}.")


def _log_kernels(remarks: Sequence[str], device: "torch.device") -> None:
    """Print the remarks of the checks on the ops, and which releases are known to be wrong, or doubted, here."""
    from basecap.ops.known_bad import in_doubt_on, known_bad_on

    for remark in remarks:
        log(f"{remark}.")
    if doubted := in_doubt_on(device):
        log(f"in doubt with the installed releases on this GPU, but used: {'; '.join(doubted.values())}.")
    if wrong := known_bad_on(device):
        log(f"known to be wrong with the installed releases on this GPU: {'; '.join(wrong.values())}.")


def guard(arguments: Sequence[str]) -> Callable[[], object]:
    """Let the checks of plugins run in a process of their own, as plugins may end it with exit code 0.

    Returns in that process only, with what to call when the command has run to its end; for other commands at once.
    """
    if arguments[:1] != ["check"] or not any(word.startswith(("--plugin", "--new")) for word in arguments):
        return lambda: None
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        return partial(os.write, writes, b".")
    os.close(writes)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to both
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(child, number))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.set_blocking(reads, False)  # a process that the plugin started may hold the other end
    ended = b""
    with contextlib.suppress(BlockingIOError):
        ended = os.read(reads, 1)
    if code == 0 and not ended:
        log("error: a plugin ended the process before its checks were done, as os._exit does; nothing is proved.")
        code = 1
    raise SystemExit(code if code >= 0 else 128 - code)
