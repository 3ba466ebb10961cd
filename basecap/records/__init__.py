"""What a study leaves on disk. Only this room knows the names and formats of these files."""

from basecap.records.run import Machine as Machine
from basecap.records.run import RunInfo as RunInfo
from basecap.records.run import RunRecords as RunRecords
from basecap.records.study import RUN_THREADS as RUN_THREADS
from basecap.records.study import StudyRecords as StudyRecords
from basecap.records.study import Sweep as Sweep
