"""One run on several hosts: a launcher on each starts its processes."""

import socket

from torch.distributed.run import main as launch

from basecap.records import StudyRecords
from tests.forks import start
from tests.run._execute import run


def test_two_launchers_train_a_model_in_parts_as_one_process_trains_it(study_file, tmp_path):
    settings, only = ("train.tokens=1024", "evals=[domain-loss]"), "transformer++"
    run(study_file, tmp_path / "one", settings, only=(only,))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = ["--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1])]
    words = ["-m", "basecap", "run", study_file, "--device", "cpu", "--out", tmp_path / "two", "--only", only]
    words += [word for setting in (*settings, "train.parallel=fsdp") for word in ("--set", setting)]
    logs, hosts = [tmp_path / f"log-{rank}" for rank in range(2)], []
    for rank, log in enumerate(logs):
        given = ["--nnodes", "2", "--nproc-per-node", "1", *place, "--node-rank", str(rank), *map(str, words)]
        hosts.append(start(launch, given, output=log, OMP_NUM_THREADS="1"))
    for host in hosts:
        host.join(250)
        host.terminate()
    assert [host.exitcode for host in hosts] == [0, 0], logs[0].read_text()[-3000:]
    one, two = (StudyRecords(tmp_path / name).run(only, 0) for name in ("one", "two"))
    assert two.info().mesh == {"parallel": "fsdp", "replicate": 1, "shard": 2} and one.info().mesh == {}
    for column in ("train_loss", "grad_norm"):
        values = [[row[column] for row in records.metrics()] for records in (one, two)]
        assert len(values[0]) == 4 and all(abs(a / b - 1) < 1e-5 for a, b in zip(*values, strict=True))
    for a, b in zip(one.evals(), two.evals(), strict=True):
        assert a.key == b.key and abs(a.value - b.value) < 1e-5
