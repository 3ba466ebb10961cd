"""One run on several hosts: a launcher on each starts its processes."""

import socket

import pytest
from torch.distributed.launcher import LaunchConfig, elastic_launch

from basecap.records import StudyRecords
from tests.forks import command, start
from tests.run._execute import run


def succeed(*arguments: object) -> None:
    """Run the command line, and return as the launcher expects it of a function."""
    with pytest.raises(SystemExit) as left:
        command(*arguments)
    assert not left.value.code


def launch(rank: int, port: int, *arguments: object) -> None:
    """Launch one process on one of two hosts, as `torchrun --nnodes 2 --node-rank RANK` does; it is a fork."""
    place = {"rdzv_backend": "static", "rdzv_endpoint": f"127.0.0.1:{port}", "rdzv_configs": {"rank": rank}}
    config = LaunchConfig(2, 2, 1, run_id="hosts", **place, max_restarts=0, start_method="fork")
    elastic_launch(config, succeed)(*arguments)


def test_two_launchers_train_a_model_in_parts_as_one_process_trains_it(study_file, tmp_path):
    settings, only = ("train.tokens=1024", "evals=[domain-loss]"), "transformer++"
    run(study_file, tmp_path / "one", settings, only=(only,))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["run", study_file, "--device", "cpu", "--out", tmp_path / "two", "--only", only]
    words += [word for setting in (*settings, "train.parallel=fsdp") for word in ("--set", setting)]
    logs = [tmp_path / f"log-{rank}" for rank in range(2)]
    hosts = [start(launch, rank, port, *words, output=log, OMP_NUM_THREADS="1") for rank, log in enumerate(logs)]
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
