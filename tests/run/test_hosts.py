"""One run on several hosts: a launcher on each starts its processes."""

import os
import socket
import subprocess
import sys

from basecap.records import StudyRecords
from tests.run._execute import run


def test_two_launchers_train_a_model_in_parts_as_one_process_trains_it(study_file, tmp_path):
    settings, only = ("train.tokens=1024", "evals=[domain-loss]"), "transformer++"
    run(study_file, tmp_path / "one", settings, only=(only,))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = ["--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1])]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *place]
    words = ["-m", "basecap.cli", "run", study_file, "--device", "cpu", "--out", tmp_path / "two", "--only", only]
    words += [word for setting in (*settings, "train.parallel=fsdp") for word in ("--set", setting)]
    options = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stderr": subprocess.PIPE, "text": True}
    hosts = [
        subprocess.Popen([*launcher, "--node-rank", str(rank), *map(str, words)], stdout=subprocess.DEVNULL, **options)
        for rank in range(2)
    ]
    said = [host.communicate(timeout=250)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said[0][-3000:]
    one, two = (StudyRecords(tmp_path / name).run(only, 0) for name in ("one", "two"))
    assert two.info().mesh == {"parallel": "fsdp", "replicate": 1, "shard": 2} and one.info().mesh == {}
    for column in ("train_loss", "grad_norm"):
        values = [[row[column] for row in records.metrics()] for records in (one, two)]
        assert len(values[0]) == 4 and all(abs(a / b - 1) < 1e-5 for a, b in zip(*values, strict=True))
    for a, b in zip(one.evals(), two.evals(), strict=True):
        assert a.key == b.key and abs(a.value - b.value) < 1e-5
