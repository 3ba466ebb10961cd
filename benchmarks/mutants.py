"""Do the tests notice deliberate faults? Usage: python -m benchmarks.mutants [WORD ...]: only mutants with such a word.

Each mutant of mutants.toml changes one piece of the code in a temporary copy of the repository and runs the tests that
should fail. The unchanged copy must pass the same tests first. Prints a Markdown table; the exit code is 1 if a mutant
survived. Processes are forked after PyTorch was imported, which otherwise takes longer than most of the tests.
"""

import compileall
import contextlib
import multiprocessing
import os
import py_compile
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parent.parent
#: Seconds after which a mutant that keeps its tests from ending counts as killed.
LIMIT = 300.0


class Mutant(NamedTuple):
    """A fault: what it is, the file, the text to replace (it must occur once) and its replacement, the tests to run."""

    what: str
    file: str
    old: str
    new: str
    tests: str


#: The mutants, in the order of the table.
MUTANTS = [Mutant(**entry) for entry in tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())["mutant"]]


def _test(copy: Path, tests: list[str]) -> None:
    """Run tests of the copy, with their output in a file; the exit code is that of pytest."""
    os.setsid()
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True  # the copy's bytecode is checked by content, not by time
    with (copy / "output").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)])
    sys.stdout.flush()
    os._exit(int(code))


def run(copy: Path, tests: list[str], limit: float | None = None) -> int | None:
    """Return the exit code of pytest, negative if a signal ended it, None if it did not end in `limit` seconds."""
    process = multiprocessing.get_context("fork").Process(target=_test, args=(copy, tests))
    process.start()
    process.join(limit)
    ended = not process.is_alive()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what the tests started
    process.join()
    return process.exitcode if ended else None


def verdict(copy: Path, mutant: Mutant) -> str:
    """Return "survived", or how the mutant was killed; raises RuntimeError for one that cannot be tried."""
    path = copy / "basecap" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise RuntimeError(f"{mutant.what}: the text to replace occurs {text.count(mutant.old)} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new))
    code = run(copy, mutant.tests.split(), LIMIT)
    path.write_text(text)
    if code == 0:
        return "survived"
    if code is None:
        return "killed (its tests did not end)"
    if code < 0:
        return f"killed ({signal.Signals(-code).name})"
    output = (copy / "output").read_text()
    if code != pytest.ExitCode.TESTS_FAILED:
        raise RuntimeError(f"{mutant.what}: pytest ended with {code}:\n{output}")
    return "killed"


def main(words: list[str]) -> int:
    """Try the mutants and print the table; return how many survived."""
    torch.set_num_threads(1)
    mutants = [mutant for mutant in MUTANTS if not words or any(word in mutant.what for word in words)]
    if not mutants:
        sys.exit(f"error: no mutant is described by {' or '.join(map(repr, words))}; leave it out to try all.")
    start, survived = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in ("basecap", "tests", "benchmarks"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(copy / "basecap", quiet=1, invalidation_mode=checked)
        # tests of one file come together, as what they share is made once
        if run(copy, sorted({test for mutant in mutants for test in mutant.tests.split()})) != 0:
            raise RuntimeError(f"the tests fail without a mutant:\n{(copy / 'output').read_text()}")
        print("| fault | file | tests | result |\n| --- | --- | --- | --- |")
        for mutant in mutants:
            found = verdict(copy, mutant)
            survived += found == "survived"
            print(f"| {mutant.what} | {mutant.file} | {mutant.tests.replace('::', ' ')} | {found} |", flush=True)
    print(f"\n{len(mutants)} mutants, {len(mutants) - survived} killed, {survived} survived.")
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
    return survived


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
