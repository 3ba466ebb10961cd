"""Training speed of whole models: every architecture at one size, in one run, on one device."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from basecap.bench import peers
from basecap.bench.contenders import Contenders, Row, compare, entries, label, with_attention
from basecap.models.config import ModelConfig
from basecap.models.language_model import LanguageModel
from basecap.models.outline import outline
from basecap.ops import recorded
from basecap.system.environment import describe
from basecap.system.progress import progress
from basecap.train.config import TrainConfig
from basecap.train.optim import build_optimiser
from basecap.train.placement import start_compilers

#: A row to measure: name, attention (see `with_attention`), and what measures it.
Job = tuple[str, str | None, Callable[[], Row]]

#: Nominal dense bf16 operations per second, by a part of the device's name; MFU is relative to it.
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


#: A model whose warm-up step takes longer than this many seconds, compilation and tuning aside, is timed once.
SLOW = 5.0


@dataclass(frozen=True, kw_only=True)
class BenchSetting:
    """What all rows of a table share: model width, vocabulary, tokens per sequence, sequences per step, steps timed."""

    hidden: int = 768
    vocab: int = 32_000
    length: int = 2048
    batch: int = 16
    steps: int = 10


def run(
    contenders: Contenders,
    setting: BenchSetting = BenchSetting(),
    *,
    device: torch.device,
    peer: bool = False,
    save: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Time training steps (forward, backward, AdamW) of architectures; return the environment and a row for each.

    Compilation and three warm-up steps are not counted; a row holds the median over the steps timed. On a GPU products
    run in bf16, models are compiled, and a first model with PyTorch's attention has a row for each of its kernels; the
    others are compared with all of them. `mfu` counts what causal attention needs, `mfu_palm` its whole square, as the
    term was first defined (arXiv 2204.02311). A model that cannot run gets a row whose note says why. When interrupted,
    the rows so far are returned and `complete` is False.

    Args:
        contenders: models by name, see `basecap.bench.contenders`; the others are compared with the first.
        setting: sizes.
        device: where to run.
        peer: whether to time flash-linear-attention's own models too, in the same setting but not compiled: that
            is how its documentation runs them.
        save: called after each row with all that is found so far.

    Raises:
        ConfigError: peers without flash-linear-attention.
    """
    jobs: list[Job] = [
        (name, attention, partial(_own, config, setting, device))
        for name, attention, config in entries(contenders, device)
    ]
    if peer:
        peers.require()
        jobs += [
            (f"fla {other.stem}ForCausalLM", None, partial(_peer, other, setting, device)) for other in peers.PEERS
        ]
    start_compilers(device, TrainConfig(tokens=1))
    found: dict[str, Any] = {"environment": describe(device), "setting": asdict(setting), "complete": False, "rows": []}
    measure("bench models", jobs, found, speeds={"tokens_per_s": ""}, device=device, save=save)
    return found


def operations(contenders: Contenders, setting: BenchSetting) -> float:
    """Return the operations of the fewest steps that `run` takes, those of slow models."""
    steps = [outline(config).training_flops(setting.length) for config in contenders.values()]
    return 3 * setting.batch * sum(steps)


def measure(
    title: str,
    jobs: Sequence[Job],
    found: dict[str, Any],
    *,
    speeds: Mapping[str, str],
    device: torch.device,
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Add a row for each job to `found["rows"]` and set `found["complete"]`, unless interrupted.

    Args:
        title: name of the work in its progress.
        jobs: what is measured.
        found: the result, changed in place.
        speeds: which numbers to compare with the first architecture, see `compare`.
        device: where the jobs run.
        save: called after each row with all that is found so far.
    """
    rows = found["rows"]
    try:
        with progress(title, total=len(jobs), unit="rows") as advance:
            for name, attention, job in jobs:
                advance(0, note=label({"architecture": name, "attention": attention}))
                row = _attempt(partial(with_attention, attention, job))
                rows.append({"architecture": name, "attention": attention, **row})
                compare(rows, speeds)
                save(found)
                _release(device)
                advance(1)
        found["complete"] = True
    except KeyboardInterrupt:
        pass  # what was measured is worth keeping


def shown(row: Row) -> Row:
    """Return what a table on the terminal shows of a row: nothing that this device does not have."""
    hidden = ("architecture", "attention", "ops")  # -v prints the ops
    cells = {key: value for key, value in row.items() if key not in hidden and value is not None}
    return {"architecture": label(row), **cells}


def _attempt(job: Callable[[], Row]) -> Row:
    """Return the row that `job` measures, or one whose note says why it cannot run, with what each op ran in `ops`."""
    with recorded() as ops:
        try:
            row = job()
        except torch.OutOfMemoryError:
            row = {"note": "cannot run: out of memory at this batch"}
        except Exception as error:  # whatever it is, it is this row's result and must not cost the others theirs
            message = (str(error).strip() or type(error).__name__).splitlines()[0]
            row = {"note": f"cannot run: {message.split('. ')[0][:200]}"}
    return {**row, "ops": dict(sorted(ops.items()))}


def _own(config: ModelConfig, setting: BenchSetting, device: torch.device) -> Row:
    model = LanguageModel(config).initialise(0).to(device)
    optimiser = build_optimiser(model, model.recipe(), TrainConfig(tokens=1))
    if device.type == "cuda":
        model.compile_training()
    row = _row(model, lambda x: sum(model(x[:, :-1], x[:, 1:], auxiliary=True)[:2]), optimiser, setting, device)
    peak = next((peak for part, peak in PEAK.items() if part in describe(device)["device"]), None)
    rate, palm_rate = (
        flops * setting.batch / (row["ms_per_step"] / 1e3)
        for flops in (model.training_flops(setting.length), _palm_flops(model, setting.length))
    )
    utilisation = {name: x / peak if peak else None for name, x in (("mfu", rate), ("mfu_palm", palm_rate))}
    return {**row, "tflops": rate / 1e12, **utilisation}


def _palm_flops(model: LanguageModel, length: int) -> float:
    """The operations of `LanguageModel.training_flops` as arXiv 2204.02311, appendix B, counts them.

    There a token attends to all `length` tokens and not, causally, to half of them in the mean: which is what it does
    in a sequence of twice the length.
    """
    return model.training_flops(2 * length) / 2


def _peer(peer: peers.Peer, setting: BenchSetting, device: torch.device) -> Row:
    peers.refuse_known_bad(peer, device)
    model: Any = peers.build(peer, hidden=setting.hidden, vocab=setting.vocab).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    row = _row(model, lambda x: model(input_ids=x[:, :-1], labels=x[:, :-1]).loss, optimiser, setting, device)
    return {**row, "note": "; ".join(filter(None, ["not compiled", row.get("note")]))}


def _row(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    optimiser: torch.optim.Optimizer,
    setting: BenchSetting,
    device: torch.device,
) -> Row:
    """Return sizes and times of training steps on tokens [batch, length + 1]."""
    on_gpu = device.type == "cuda"
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, setting.vocab, (setting.batch, setting.length + 1), generator=generator).to(device)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            value = loss(tokens)
        value.backward()
        optimiser.step()

    times = _times(step, setting.steps, device)
    seconds = statistics.median(times)
    row = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_s": setting.batch * setting.length / seconds,
        "ms_per_step": 1e3 * seconds,
        "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None,
    }
    return row if len(times) == setting.steps else row | {"note": "so slow that one step was timed"}


def _times(step: Callable[[], None], steps: int, device: torch.device) -> list[float]:
    """Return the seconds of `steps` calls, after three that do not count; of one call where calls are slow."""
    _seconds(step, 1, device)  # compiles and tunes: says nothing
    for _ in range(2):
        if _seconds(step, 1, device)[0] > SLOW:
            return _seconds(step, 1, device)
    return _seconds(step, steps, device)


def _seconds(step: Callable[[], None], calls: int, device: torch.device) -> list[float]:
    """Return the seconds of each call; on a GPU they follow each other as in training, without waiting in between."""
    if device.type != "cuda":
        clock = [time.perf_counter()]
        for _ in range(calls):
            step()
            clock.append(time.perf_counter())
        return [after - before for before, after in pairwise(clock)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]


def _release(device: torch.device) -> None:
    """Free what the last model held, and count its peak memory no more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
