"""The records of the branches of a run with schedule wsd, in DIR/runs/<name>-s<seed>/branches/<tokens>/.

A branch is a decayed copy of its run, the trunk, that ends after `tokens` tokens. Its directory has the files of a run:
metrics.jsonl has the steps of the decay, evals.jsonl and documents/ have the evaluation at its end, and run.json has

    tokens      tokens at its end        start       tokens at which it leaves the trunk
    status      running or finished

A gap of such a study is measured between branches: those of the trunk, whose rate has not decayed, are left out. The
files of the trunk lie in the run's own directory, as those of any run.
"""

import shutil
from dataclasses import asdict, dataclass, replace

from pydantic import TypeAdapter, ValidationError

from basecap.options import damaged
from basecap.records.run import RunRecords, Status
from basecap.system.files import entries, read_json, write_json


@dataclass(frozen=True, kw_only=True)
class BranchInfo:
    """The content of a branch's run.json, see above."""

    tokens: int
    start: int
    status: Status = "running"


_INFO = TypeAdapter(BranchInfo)


def branch_of(run: RunRecords, tokens: int) -> RunRecords:
    """Return the records of the branch that ends after `tokens` tokens; touches no file."""
    return RunRecords(run.path / "branches" / str(tokens), run.place)


def finished_branches(run: RunRecords) -> list[RunRecords]:
    """Return the finished branches of a run, by their tokens; none for other schedules."""
    names = [path for path in entries(run.path / "branches") if path.name.isdecimal()]
    found = [RunRecords(path) for path in sorted(names, key=lambda path: int(path.name))]
    return [branch for branch in found if branch.finished]


def branch_info(branch: RunRecords) -> BranchInfo:
    """Return what a branch that has started is; raises DataError when its file is damaged."""
    path = branch.path / "run.json"
    try:
        return _INFO.validate_python(read_json(path))
    except ValidationError as error:
        raise damaged(path, error) from error


def start_branch(branch: RunRecords, tokens: int, start: int) -> None:
    """Record that a branch trains."""
    branch.refuse_left()
    write_json(branch.path / "run.json", asdict(BranchInfo(tokens=tokens, start=start)))


def finish_branch(branch: RunRecords) -> None:
    """Record that a branch has ended, and remove its checkpoints; its weights stay."""
    branch.refuse_left()
    write_json(branch.path / "run.json", asdict(replace(branch_info(branch), status="finished")))
    shutil.rmtree(branch.resume, ignore_errors=True)
