"""Finds faults of NVIDIA's assembler in the machine code of a kernel for Hopper."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@(\S+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"(\.L_\w+):")
REGISTER = re.compile(r"\bUR(\d+)(\.64)?")

#: Instructions that write a uniform register and are not called U...; and those that are, but write none.
WRITING, READING = ("S2UR", "R2UR", "REDUX"), ("UTMA", "UBLK", "UCGABAR", "USETMAX")


class Instruction(NamedTuple):
    """An instruction: the predicate that it depends on, or None."""

    predicate: str | None
    name: str
    operands: list[str]

    @property
    def written(self) -> set[int]:
        """The uniform registers that it writes."""
        uniform = self.name.startswith("U") and not self.name.startswith(READING)
        if not (uniform or self.name.startswith(WRITING)) or not re.fullmatch(r"UR\d+", self.operands[0]):
            return set()
        wide = ".64" in self.name or ".WIDE" in self.name
        first = int(self.operands[0][2:])
        return set(range(first, first + 1 + wide))

    @property
    def read(self) -> set[int]:
        """The uniform registers that it reads."""
        found = set[int]()
        operands = ",".join(self.operands[1:] if self.written else self.operands)
        for first in re.findall(r"\bgdesc\[UR(\d+)\]", operands):
            # The descriptors of both operands of a product; of one in registers there is none.
            both = self.operands[1].startswith("gdesc")
            found |= set(range(int(first) + (0 if both else 2), int(first) + 4))
        for first in re.findall(r"\bdesc\[UR(\d+)\]", operands):
            found |= {int(first), int(first) + 1}
        for first, wide in REGISTER.findall(re.sub(r"g?desc\[UR\d+\]", "", operands)):
            pair = wide or self.name.startswith("UIADD3.64")
            found |= {int(first), int(first) + 1} if pair else {int(first)}
        return found


def disassemble(cubin: bytes) -> str:
    """Return the machine code of a kernel as nvdisasm prints it."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unwritten(code: str) -> list[str]:
    """Return the instructions that read a uniform register which is not written on every path to them.

    The assembler of CUDA 12.8 makes such code of some kernels: addresses of products are then what an earlier kernel
    left in the register.
    """
    instructions, labels = list[Instruction](), dict[str, int]()
    for line in code.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := INSTRUCTION.match(line):
            predicate, name, operands = found.groups()
            instructions.append(Instruction(predicate, name, [part.strip() for part in operands.split(",")]))
    # What is written on every path to an instruction; one that no path has reached yet is not there.
    before, waiting = {0: frozenset[int]()}, [0]
    while waiting:
        place = waiting.pop()
        after = before[place] | instructions[place].written
        for follower in _followers(instructions[place], place, labels):
            both = after & before.get(follower, after)
            if follower < len(instructions) and both != before.get(follower):
                before[follower] = both
                waiting.append(follower)
    wrong = [instructions[place] for place in sorted(before) if instructions[place].read - before[place]]
    return [f"{x.name} {', '.join(x.operands)}" for x in wrong]


def _followers(instruction: Instruction, place: int, labels: dict[str, int]) -> list[int]:
    kind, operands = instruction.name.split(".")[0], instruction.operands
    found = re.findall(r"\.L_\w+", ",".join(operands)) if kind in ("BRA", "BRX", "CALL") else []
    targets = [labels[label] for label in found]
    # A jump may depend on a predicate, or on a uniform one, its first operand.
    leaves = kind in ("EXIT", "RET", "BRX") or (kind == "BRA" and len(operands) == 1)
    return targets if leaves and not instruction.predicate else [*targets, place + 1]
