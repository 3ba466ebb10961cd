"""Compiles all kernels for each card of `_cards`, and writes what each needs there beside what the card has.

`make cards`, or `python -m tests.ops.kernels_on_cards results/kernels/cards.json`, takes minutes of one core, and no
GPU. Beside the JSON it writes the table `cards.md`. Exits with code 1 where a kernel does not compile, or has no room.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from basecap.errors import ConfigError
from basecap.ops import recorded
from basecap.ops._dispatch import ALSO, TRITON

HEAD = """# Kernels on other cards

Compiled for each card as the op launches them there, in bfloat16, not run: what an op runs, and the most shared
memory that one of its kernels takes of what a program can have. `top1_chunk` includes its decoding steps.
`python -m tests.ops.kernels_on_cards results/kernels/cards.json` makes this page and [cards.json](cards.json), which
has every kernel.

"""


def table(found: dict) -> str:
    """Return the page of what `main` found."""
    cards = found["cards"]
    head = [f"{name} ({card['program'] // 1024} KB)" for name, card in cards.items()]
    lines = [f"Triton {found['triton']}.", "", " | ".join(["| op", *head]) + " |", "| --- " * (len(cards) + 1) + "|"]
    for op in sorted({row["op"] for row in found["ops"]}):
        lines.append(" | ".join([f"| `{op}`", *(_cell(found, name, op) for name in cards)]) + " |")
    return HEAD + "\n".join(lines) + "\n"


def _cell(found: dict, card: str, op: str) -> str:
    own = [row for row in found["kernels"] if row["card"] == card and row["op"] == op]
    runs = sorted({row["runs"] for row in found["ops"] if row["card"] == card and row["op"] == op})
    most = max((row["shared"] for row in own if row["shared"] is not None), default=0)
    faults = sum(bool(row["fault"]) for row in own)
    size = f"{most / 1024:.0f} KB" if own else ""
    return ", ".join(filter(None, [*runs, size, f"{faults} faults" if faults else ""]))


def wrong(found: dict) -> list[str]:
    """Return which kernels do not compile, or have no room on a card, and why."""
    room = {name: card["program"] for name, card in found["cards"].items()}
    return [
        f"{row['kernel']} of {row['op']} on {row['card']}: {row['fault'] or str(row['shared']) + ' bytes'}"
        for row in found["kernels"]
        if row["fault"] or row["shared"] > room[row["card"]]
    ]


def compile_all(card: str) -> dict[str, list[dict]]:
    """Return what ops run on a card in bfloat16, and the kernels compiled for it, in this process."""
    from tests.ops._cards import pretend

    kernels = pretend(card)
    from tests.ops.test_kernels_compile import LAUNCHES

    ops, rows = [], []
    for launch in LAUNCHES:
        op, refused = launch.__name__.removeprefix("launch_").removeprefix("more_"), ""
        with recorded() as ran:
            try:
                launch(torch.bfloat16)
            except ConfigError as error:  # of launches that ask for kernels, as "auto" takes others in float32
                refused = f"plain PyTorch: {error}"
        for path in (refused or ran.get(op, TRITON)).split(ALSO):
            runs, _, reason = path.partition(": ")
            ops.append({"card": card, "op": op, "runs": runs, "reason": reason})
        rows += [{"card": card, "op": op, **kernel._asdict()} for kernel in dict.fromkeys(kernels)]
        kernels.clear()
    return {"ops": ops, "kernels": rows}


def main(out: Path) -> None:
    """Compile for each card in a process of its own, and write what they found."""
    import triton

    from tests.ops._cards import CARDS

    cards = {name: card._asdict() for name, card in CARDS.items()}
    found: dict = {"triton": triton.__version__, "cards": cards, "ops": [], "kernels": []}
    for card in CARDS:
        command = [sys.executable, "-m", "tests.ops.kernels_on_cards", "--card", card]
        environment = os.environ | {"TRITON_INTERPRET": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        for key, rows in json.loads(done.stdout).items():
            found[key] += rows
    out.write_text(json.dumps(found).replace('{"card"', '\n{"card"') + "\n")
    out.with_suffix(".md").write_text(table(found))
    if faults := wrong(found):
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    if sys.argv[1] == "--card":
        print(json.dumps(compile_all(sys.argv[2])))
    else:
        main(Path(sys.argv[1]))
