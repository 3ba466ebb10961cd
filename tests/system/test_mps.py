import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from basecap.system import mps

#: Keeps what it was asked for, and runs while its file `running` is there.
CONTROL = """#!/bin/sh
here="${CUDA_MPS_PIPE_DIRECTORY:-/nowhere}"
if [ "$1" = -d ]; then
    echo "start $here $CUDA_MPS_LOG_DIRECTORY ${CUDA_VISIBLE_DEVICES-all}" >> @LOG@
    [ @FAILS@ = yes ] && exit 1
    touch "$here/running"
    exit 0
fi
read -r command
echo "$command $here" >> @LOG@
[ -e "$here/running" ]
"""
STARTED = "Runs on the same GPU compute at the same time: this command has started CUDA MPS and stops it."
FAILED = "Runs on the same GPU take turns: CUDA MPS could not be started."


@pytest.fixture
def control(tmp_path, monkeypatch):
    def install(fails: str = "no", content: str = CONTROL) -> Path:
        program, log = tmp_path / "bin" / mps.CONTROL, tmp_path / "log"
        program.parent.mkdir()
        program.write_text(content.replace("@LOG@", str(log)).replace("@FAILS@", fails))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return log

    return install


def test_the_service_is_started_and_stopped(control, monkeypatch):
    log, said = control(), []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with mps.service(said.append, probe=["sh", "-c", '[ -e "$CUDA_MPS_PIPE_DIRECTORY/running" ]']) as directory:
        assert (directory / "running").exists() and said == [STARTED]
        assert log.read_text() == f"get_server_list /nowhere\nstart {directory} {directory} all\n"
    assert log.read_text().endswith(f"quit {directory}\n")
    assert not directory.exists() and len(said) == 1


@pytest.mark.parametrize(("fails", "probe"), [("yes", "true"), ("no", "false"), ("no", "no-such-program")])
def test_without_the_service_runs_take_turns(control, fails, probe):
    log, said = control(fails), []
    with mps.service(said.append, probe=[probe]) as directory:
        assert directory is None and said == [FAILED]
    started = log.read_text().splitlines()[1].split()[1]
    assert log.read_text().endswith(f"quit {started}\n") and not Path(started).exists()


def test_a_service_that_runs_is_used_and_left(control):
    log, said = control(content='#!/bin/sh\nread -r command\necho "$command" >> @LOG@\n'), []
    with mps.service(said.append, probe=["true"]) as directory:
        assert directory is None
    assert said == ["Runs on the same GPU compute at the same time: CUDA MPS runs on this machine."]
    assert log.read_text() == "get_server_list\n"


def test_a_machine_without_the_service_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    said = []
    with mps.service(said.append) as directory:
        assert directory is None
    assert said == [f"Runs on the same GPU take turns: CUDA MPS is not installed ({mps.CONTROL} is not found)."]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_service_ends_with_a_killed_process(control, tmp_path, number):
    log, ready = control(), tmp_path / "ready"
    code = f"""
import time
from pathlib import Path
from basecap.system import mps
with mps.service(print, probe=["true"]) as directory:
    Path({str(ready)!r}).write_text(str(directory))
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (ready.exists() and ready.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    process.wait()
    directory = Path(ready.read_text())
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert log.read_text().endswith(f"quit {directory}\n") and not directory.exists()


def test_the_driver_is_given_the_directory(tmp_path):
    code = f"""
import subprocess
from pathlib import Path
from basecap.system import mps
mps.join(Path({str(tmp_path)!r}))
subprocess.run(["sh", "-c", 'echo "$CUDA_MPS_PIPE_DIRECTORY"'], check=True)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == f"{tmp_path}\n"
