"""A Slurm cluster of two nodes on this machine, in a directory of its own: nothing of the system is changed."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

#: The programs that it consists of, and those that use it.
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "squeue", "scancel", "scontrol")
#: Where Debian has those that are not on everybody's path.
SBIN = ("/usr/sbin", "/sbin")

CONFIGURATION = """
ClusterName=basecap
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge.socket
StateSaveLocation={here}/controller
SlurmdSpoolDir={here}/%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/%n.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=5
KillWait=5
MaxJobCount=40
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,default_queue_depth=100
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1 State=UNKNOWN
PartitionName=both Nodes=n1,n2 Default=YES MaxTime=30 State=UP
"""


def missing() -> str:
    """Return why this machine cannot have such a cluster, "" where it can."""
    if os.geteuid() != 0:
        return "the daemons of Slurm need root"
    path = os.pathsep.join((os.environ.get("PATH", ""), *SBIN))
    lacking = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    return f"not installed: {', '.join(lacking)} (Debian: slurm-wlm, munge)" if lacking else ""


class Cluster:
    """A controller and the nodes n1 and n2 with one processor each, which run until `stop`."""

    def __init__(self, here: Path):
        """Start it in an empty directory; SLURM_CONF of `environment` leads its commands there."""
        self.here = here
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(here / "slurm.conf"),
            "PATH": os.pathsep.join((os.environ["PATH"], *SBIN)),
        }
        here.chmod(0o755)
        for name in ("controller", "n1", "n2"):
            (here / name).mkdir()
        key = here / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        controller, first, second = _free_ports(3)
        text = CONFIGURATION.format(
            here=here, host=socket.gethostname().partition(".")[0], port=controller, first=first, second=second
        )
        (here / "slurm.conf").write_text(text)
        files = {name: here / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        options = [
            f"--{option}={path}"
            for option, path in zip(("socket", "pid-file", "log-file", "seed-file"), files.values(), strict=True)
        ]
        self.command("munged", "--force", f"--key-file={key}", *options)
        self.command("slurmctld", "-c")
        self.start_node("n1")
        self.start_node("n2")
        self.wait_idle()

    def command(self, *words: str) -> str:
        """Return what a command prints; raises where it fails."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def start_node(self, name: str) -> None:
        """Start a node that does not run."""
        self.command("slurmd", "-N", name)

    def lose_node(self, name: str) -> None:
        """Kill a node with all that runs on it, as a loss of power does, which the controller notes at once."""
        _kill(self.here / f"{name}.pid")
        for process in self._tasks(name):
            parent = process.with_name((process / "stat").read_text().rpartition(")")[2].split()[1])
            for one in (parent, process) if "slurmstepd" in (parent / "comm").read_text() else (process,):
                _kill_number(int(one.name))
        self.command("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def signal_tasks(self, name: str, number: signal.Signals) -> None:
        """Send a signal to all that runs on a node, such as SIGSTOP."""
        for process in self._tasks(name):
            _kill_number(int(process.name), number)

    def _tasks(self, name: str) -> list[Path]:
        """Return the processes of the jobs on a node."""
        own, found = {f"SLURMD_NODENAME={name}", f"SLURM_CONF={self.here}/slurm.conf"}, []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if own <= {*(process / "environ").read_text(errors="replace").split("\0")}:
                    found.append(process)
        return found

    def wait_idle(self) -> None:
        """Wait until both nodes are up."""
        for _ in range(300):
            found = subprocess.run(
                ["sinfo", "--noheader", "--format=%t %D"], env=self.environment, capture_output=True, text=True
            )
            if found.stdout.split() == ["idle", "2"]:
                return
            time.sleep(0.1)
        raise AssertionError(f"the nodes of Slurm are not up: {found.stdout}{found.stderr}")

    def place_of(self, task: str) -> tuple[str, str]:
        """Return the node that a task of an array runs on, and the number of its own job."""
        node, number = self.command("squeue", "--noheader", f"--jobs={task}", "--format=%N %A").split()
        return node, number

    @contextlib.contextmanager
    def telling(self, number: str) -> Iterator[None]:
        """Send SIGTERM to the script of a job, again and again while other tasks of its array wait."""
        with subprocess.Popen(["scancel", "--signal=TERM", "--batch", number], env=self.environment) as scancel:
            try:
                yield
            finally:
                scancel.kill()

    def are_waiting(self, *tasks: str) -> bool:
        """Return whether these tasks have gone back into the queue."""
        states = [self.command("squeue", "--noheader", f"--jobs={task}", "--format=%T").strip() for task in tasks]
        return states == ["PENDING"] * len(tasks)

    def begin(self, *tasks: str) -> None:
        """Let tasks begin now, which went back into the queue and would wait for minutes."""
        for task in tasks:
            self.command("scontrol", "update", f"jobid={task}", "starttime=now")

    def empty(self) -> None:
        """Cancel all jobs, and wait until they have ended."""
        self.command("scancel", "--user=root")
        while self.command("squeue", "--noheader"):
            time.sleep(0.1)

    def stop(self) -> None:
        """Cancel all jobs and end the daemons."""
        subprocess.run(["scancel", "--user=root"], env=self.environment, capture_output=True)
        for name in ("n1", "n2", "slurmctld", "munge"):
            _kill(self.here / f"{name}.pid", signal.SIGTERM)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _kill(file: Path, number: int = signal.SIGKILL) -> None:
    if file.exists():
        _kill_number(int(file.read_text()), number)


def _kill_number(process: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
