"""What PyTorch keeps of compiled code."""

#: Maximum number of compiled versions of a block: one per kind of layer and sequence length.
MOST_VERSIONS = 64


def reset_compiler() -> None:
    """Forget compiled code, and allow `MOST_VERSIONS` of one function."""
    import torch._dynamo  # takes half a second, which uncompiled models do not need

    torch.compiler.reset()
    # PyTorch gives up and runs uncompiled after 8 versions of a block: kinds of layers times lengths of sequences.
    torch._dynamo.config.recompile_limit = MOST_VERSIONS
