"""The records of the branches of a run with schedule wsd, in DIR/runs/<name>-s<seed>/branches/<tokens>/.

A branch is a decayed copy of its run, the trunk, that ends after `tokens` tokens. Its directory has the files of a run:
metrics.jsonl has the steps of the decay, evals.jsonl and documents/ have the evaluation at its end, and run.json has

    tokens      tokens at its end        start       tokens at which it leaves the trunk
    status      running or finished

A gap of such a study is measured between branches: those of the trunk, whose rate has not decayed, are left out. The
files of the trunk lie in the run's own directory, as those of any run.
"""

import shutil

from basecap.records.study import RunRecords
from basecap.system.files import entries


def branch_of(run: RunRecords, tokens: int) -> RunRecords:
    """Return the records of the branch that ends after `tokens` tokens; touches no file."""
    return RunRecords(run.path / "branches" / str(tokens))


def finished_branches(run: RunRecords) -> list[RunRecords]:
    """Return the finished branches of a run, by their tokens; none for other schedules."""
    names = [path for path in entries(run.path / "branches") if path.name.isdecimal()]
    found = [RunRecords(path) for path in sorted(names, key=lambda path: int(path.name))]
    return [branch for branch in found if branch.info().get("status") == "finished"]


def start_branch(branch: RunRecords, tokens: int, start: int) -> None:
    """Record that a branch trains."""
    branch.write_info({"tokens": tokens, "start": start, "status": "running"})


def finish_branch(branch: RunRecords) -> None:
    """Record that a branch has ended, and remove its checkpoints; its weights stay."""
    branch.write_info(branch.info() | {"status": "finished"})
    shutil.rmtree(branch.resume, ignore_errors=True)
