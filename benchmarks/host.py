"""Measure the tokens/s of a host of GPUs with `basecap run`: one card and all, one run a card and several side by side.

Run `python -m benchmarks.host --cache CACHE --json FILE [--before DIR]` on a machine with GPUs; CACHE is what `basecap
data prepare limited-zoo --set data.cache=CACHE` wrote, DIR an earlier version of this repository to compare with. Each
measurement starts the command, waits until every run has trained a few steps, counts the steps of all runs over some
seconds, and stops it. The widest one of a version comes first and finds no compiled code, the others find what it left.
Prints a table with ratios; machines and moments differ, so only numbers of one call can be compared.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
#: Steps that every run trains before steps are counted: the first ones compile, and fill the GPU's queue.
WARM = 8
#: Seconds after which a measurement that has not begun is given up.
LIMIT = 180.0


def steps_of(out: Path) -> dict[str, int]:
    """Return how many steps each run has recorded."""
    return {path.parent.name: path.read_bytes().count(b"\n") for path in out.glob("runs/*/metrics.jsonl")}


def step_tokens(out: Path) -> int:
    """Return the tokens of a step."""
    path = next(out.glob("runs/*/metrics.jsonl"))
    return int(json.loads(path.read_bytes().splitlines()[0])["tokens"])


def measure(version: Path, cards: int, each: int, options: argparse.Namespace, caches: Path) -> dict[str, Any]:
    """Return the steps that the runs of one command made in a window, and how long it took to begin."""
    runs = cards * each
    with tempfile.TemporaryDirectory() as directory:
        out, log = Path(directory) / "out", Path(directory) / "log"
        seeds = f"[{','.join(map(str, range(runs)))}]"
        settings = [f"reference_seeds={seeds}", "seeds=[0]", "train.eval_every=1e9", "train.tokens=1e9"]
        settings += [f"data.cache={options.cache.resolve()}", f"data.path={options.path}", *options.set]
        command = [sys.executable, "-m", "basecap", "run", options.study, "--only", options.only, "--out", str(out)]
        command += ["--per-device", str(each), *(word for setting in settings for word in ("--set", setting))]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(cards)))} if torch.cuda.is_available() else {}
        environment = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")} | visible
        environment |= {"PYTHONPATH": os.pathsep.join([str(version), os.environ.get("PYTHONPATH", "")])}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
        began = time.monotonic()
        with log.open("w") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=directory)
        try:
            found = _window(process, out, runs, options.seconds)
        except TimeoutError as error:
            found = {"failed": f"{error}: {log.read_text()[-2000:]}"}
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)  # every run writes a checkpoint
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        said = [line for line in log.read_text().splitlines() if "GPU" in line]
    return {"cards": cards, "runs a card": each, **found, "whole s": round(time.monotonic() - began, 1), "said": said}


def _window(process: subprocess.Popen, out: Path, runs: int, seconds: float) -> dict[str, Any]:
    """Wait until all runs train, then count the steps of each; raises TimeoutError when they do not."""
    began = time.monotonic()
    while len(found := steps_of(out)) < runs or min(found.values()) < WARM:
        if process.poll() is not None or time.monotonic() - began > LIMIT:
            raise TimeoutError("the runs do not train")
        time.sleep(0.1)
    start, before = time.monotonic(), steps_of(out)
    time.sleep(seconds)
    after, end = steps_of(out), time.monotonic()
    size = step_tokens(out)
    rates = [round((after[name] - before[name]) * size / (end - start)) for name in sorted(before)]
    return {
        "seconds until all train": round(start - began, 1),
        "window s": round(end - start, 2),
        "tokens/s": sum(rates),
        "tokens/s of each run": rates,
        "load": round(os.getloadavg()[0], 1),
    }


def machine() -> dict[str, Any]:
    """Return what the numbers are of."""
    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"gpus": cards, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the measurements as Markdown, with ratios to one run on one card of the same version, and to before."""
    rates = {(row["version"], row["cards"], row["runs a card"]): row.get("tokens/s") for row in rows}
    head = [
        "version",
        "cards",
        "runs a card",
        "tokens/s",
        "median of a run",
        "to one run",
        "to before",
        "all train after",
    ]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        version, cards, each = row["version"], row["cards"], row["runs a card"]
        cells = [version, str(cards), str(each), *["failed", "", "", "", ""]]
        if "failed" not in row:
            others = [rates.get((version, 1, 1)), rates.get(("before", cards, each))]
            ratios = [f"{row['tokens/s'] / other:.2f}" if other else "" for other in others]
            median = f"{statistics.median(row['tokens/s of each run']):,.0f}"
            cells[3:] = [f"{row['tokens/s']:,}", median, *ratios, f"{row['seconds until all train']} s"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table and write the numbers after each measurement."""
    options = _options()
    versions = {"now": (ROOT, options.shapes)}
    if options.before is not None:
        versions["before"] = (options.before.resolve(), options.before_shapes)
    content: dict[str, Any] = {"machine": machine(), "study": options.study, "measurements": []}
    for name, (root, shapes) in versions.items():
        with tempfile.TemporaryDirectory() as caches:
            for shape in shapes:
                cards, each = map(int, shape.split("x"))
                row = {"version": name, **measure(root, cards, each, options, Path(caches))}
                content["measurements"].append(row)
                options.json.write_text(json.dumps(content, indent=1) + "\n")
                print(json.dumps(row), file=sys.stderr, flush=True)
    print(table(content["measurements"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="tokens/s of a host of GPUs")
    parser.add_argument("--cache", type=Path, required=True, help="prepared text")
    parser.add_argument("--path", default="slimpajama-mini", help="data.path that the text was prepared with")
    parser.add_argument("--json", type=Path, required=True, help="file for all numbers")
    parser.add_argument("--before", type=Path, help="an earlier version of this repository")
    parser.add_argument("--study", default="limited-zoo")
    parser.add_argument("--only", default="transformer++", help="the architecture that trains")
    parser.add_argument("--set", action="append", default=[], help="a setting of the study")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long steps are counted")
    count = max(1, torch.cuda.device_count())
    widths = [f"{cards}x{each}" for cards in (4, 2, 1) if cards <= count for each in (5, 2, 1)]
    parser.add_argument("--shapes", nargs="*", default=widths, help="CARDSxRUNS to measure, the widest first")
    parser.add_argument("--before-shapes", nargs="*", default=widths, help="the same for --before")
    return parser.parse_args()


if __name__ == "__main__":
    main()
