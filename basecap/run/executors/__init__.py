"""Where the jobs of a study run, one file each: a new executor needs only a file here, and is chosen by its name."""

from basecap.run.executors._contract import EXECUTORS as EXECUTORS
from basecap.run.executors._contract import Executor as Executor
from basecap.run.executors._contract import device_here as device_here
from basecap.run.executors._contract import devices_for as devices_for
from basecap.run.executors._contract import executor as executor
from basecap.run.executors._contract import is_remote as is_remote
from basecap.run.executors._contract import prepare_by_jobs as prepare_by_jobs
from basecap.run.resources import Resources as Resources
