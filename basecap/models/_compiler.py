"""What basecap asks of PyTorch's compiler."""

from basecap.ops import forget_compiled, note_compiled

#: Maximum number of compiled versions of a block: one per kind of layer and sequence length.
MOST_VERSIONS = 64
#: Models of one configuration, one after the other, that share compiled code. One that cannot, such as a mixer that
#: PyTorch compiles for each instance, adds versions.
MOST_SHARING = 4
#: What a compiled `Block.step` reads as numbers that vary. PyTorch would compile it for the first number of tokens, and
#: then again for all others.
VARYING = "L['cache'].mixer.length,L['cache'].feed_forward.length"
#: The configuration of the models that compiled code is for, with the tag of PyTorch's cache, once for each of them.
_sharing: list[object] = []


def reset_compiler(config: object = None) -> None:
    """Forget compiled code, allow `MOST_VERSIONS` of one function, and expect backward passes outside autocast.

    Code for models of `config` stays for another such model, at most `MOST_SHARING` times: to find it on the disk takes
    seconds, even where that is possible. Whoever compiles for something that PyTorch does not look at, such as the
    attention that its SDPA may choose, sets `torch.compiler.config.cache_key_tag`, and shares nothing across tags.
    """
    import torch._dynamo  # takes half a second, which uncompiled models do not need
    import torch._functorch.config as tracing
    import torch.compiler.config

    key = config, torch.compiler.config.cache_key_tag
    if config is not None and len(_sharing) < MOST_SHARING and key in _sharing:
        _sharing.append(key)
        note_compiled()
        return
    torch.compiler.reset()
    forget_compiled()
    _sharing[:] = [] if config is None else [key]
    # PyTorch gives up and runs uncompiled after 8 versions of a block: kinds of layers times lengths of sequences.
    torch._dynamo.config.recompile_limit = MOST_VERSIONS
    torch.compiler.config.dynamic_sources = VARYING
    # By default it traces the backward pass under the autocast of the forward pass. Training calls it outside, and
    # products that an op computes in float32, `without_autocast`, would have their gradients rounded to 16 bits.
    if hasattr(tracing, "backward_pass_autocast"):  # older versions have no choice
        tracing.backward_pass_autocast = "off"
