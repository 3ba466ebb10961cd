"""What the class of a mixer lacks, found when it is registered."""

import inspect

#: The arguments that the methods of a mixer are called with, by position.
ARGUMENTS = {
    "forward": ("x", "segments=None"),
    "init_cache": ("batch", "max_length"),
    "step": ("x", "cache"),
    "flops": ("length",),
    "state_bytes": ("length",),
}


def unfinished(cls: type) -> str | None:
    """Return what is wrong with the methods of a mixer, as the end of a sentence that begins with its name, or None."""
    abstract: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
    if abstract:
        return f"lacks {', '.join(sorted(abstract))}; {_remedy(abstract)}"
    for name, arguments in ARGUMENTS.items():
        method = inspect.getattr_static(cls, name)
        if not inspect.isfunction(method):  # such as a static or wrapped one
            continue
        try:
            inspect.signature(method).bind_partial(None, *arguments)
        except TypeError:
            given = inspect.signature(method)
            return (
                f"has {name}{given}, which is called with other arguments; define {name}(self, {', '.join(arguments)})"
            )
    return None


def _remedy(abstract: frozenset[str]) -> str:
    if {"init_cache", "step", "state_bytes"} <= abstract:
        return "define them, or derive from basecap.mixers.ForwardOnly, which needs forward and flops only"
    return "define it"
