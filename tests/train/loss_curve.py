"""A short training of two architectures, whose losses and gradient norms are frozen to the bit.

`python -m tests.train.loss_curve` freezes them anew; do so only in a commit that says why they change.
"""

import json
import platform
import tempfile
from pathlib import Path

import torch

from basecap.models.language_model import LanguageModel
from basecap.plan.runs import plan_runs
from basecap.records import RunRecords
from basecap.study.config import load_study
from basecap.train.distributed import Processes
from basecap.train.loop import DevicePlacement, Trainer
from tests.train.conftest import VOCAB, RandomStream

SNAPSHOT = Path(__file__).parents[1] / "snapshots" / "loss_curve.json"
SETTINGS = (
    *("architectures=[transformer++, mamba-2]", "seeds=[0]", "reference_seeds=null", "model.hidden=32"),
    *("data.seq_len=32", "train.tokens=15360", "train.batch=16", "train.warmup=10", "train.eval_every=5120"),
)


def machine() -> str:
    """Return what decides the last bits of a sum: PyTorch's version, its vector instructions and the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = models[0] if models else platform.processor()
    return f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {processor}"


def curves(directory: Path) -> dict[str, list[str]]:
    """Return losses and gradient norms of every step by architecture, as hexadecimal digits: no bit is rounded off."""
    found = {}
    placement = DevicePlacement.choose(torch.device("cpu"), Processes(), "fp32")
    for run in plan_runs(load_study("quickstart", SETTINGS), VOCAB):
        records = RunRecords(directory / run.name)
        model = LanguageModel(run.model).initialise(run.seed)
        trainer = Trainer(
            model,
            run.train,
            run.seed,
            workload=RandomStream(run.model.max_length),
            records=records,
            placement=placement,
        )
        trainer.run(run.label, lambda model, step, tokens: None)
        rows = records.metrics()
        found[run.name] = [row[key].hex() for row in rows for key in ("train_loss", "grad_norm")]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        frozen = {"machine": machine(), "curves": curves(Path(directory))}
    SNAPSHOT.write_text(json.dumps(frozen, indent=1) + "\n")
