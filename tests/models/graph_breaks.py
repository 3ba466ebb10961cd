"""Which architectures PyTorch cannot trace as one graph a block: `python -m tests.models.graph_breaks [NAME ...]`.

Training compiles each block and the loss, and a graph break there costs speed without a word. Versions of PyTorch trace
different things, so run it with each that matters: all architectures, or those named, tiny and on the CPU. Prints the
first reason of each and ends with their number.
"""

import sys

import torch

from basecap.mixers import ARCHITECTURES
from basecap.models import LanguageModel, model_config


def reason(name: str) -> str | None:
    """Return why a training pass of an architecture cannot be traced, None if it can."""
    torch._dynamo.reset()
    model = LanguageModel(model_config(name, hidden=128, vocab=64, layers=2, max_length=128)).initialise(0)
    traced = {"dynamic": False, "backend": "eager", "fullgraph": True}
    model._training_blocks = [torch.compile(block, **traced) for block in model._blocks]
    model._training_loss = torch.compile(model._loss, **traced)
    tokens = torch.arange(256).reshape(2, 128) % 64
    try:
        model(tokens, tokens.roll(-1, 1))
    except torch._dynamo.exc.TorchDynamoException as error:
        return str(error).strip().splitlines()[0]
    return None


if __name__ == "__main__":
    broken = 0
    for name in sys.argv[1:] or ARCHITECTURES.names():
        if found := reason(name):
            broken += 1
            print(f"{name}: {found}", flush=True)
    print(f"PyTorch {torch.__version__}: {broken} cannot be traced as one graph a block")
    raise SystemExit(broken > 0)
