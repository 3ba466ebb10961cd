"""What basecap asks of PyTorch's compiler."""

#: Maximum number of compiled versions of a block: one per kind of layer and sequence length.
MOST_VERSIONS = 64


def reset_compiler() -> None:
    """Forget compiled code, allow `MOST_VERSIONS` of one function, and expect backward passes outside autocast."""
    import torch._dynamo  # takes half a second, which uncompiled models do not need
    import torch._functorch.config as tracing

    torch.compiler.reset()
    # PyTorch gives up and runs uncompiled after 8 versions of a block: kinds of layers times lengths of sequences.
    torch._dynamo.config.recompile_limit = MOST_VERSIONS
    # By default it traces the backward pass under the autocast of the forward pass. Training calls it outside, and
    # products that an op computes in float32, `without_autocast`, would have their gradients rounded to 16 bits.
    if hasattr(tracing, "backward_pass_autocast"):  # older versions have no choice
        tracing.backward_pass_autocast = "off"
