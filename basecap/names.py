"""Names of architectures, read without importing one, and of studies."""

#: The scale of what a study file says outside `scales`, where it has any.
PAPER = "paper"


def split_body(name: str) -> tuple[str, str | None]:
    """Split "X in Y", the mixers of architecture X in block family Y, into the two; Y is None for a plain name.

    >>> split_body("transformer++ in rwkv-7"), split_body("mamba-2")
    (('transformer++', 'rwkv-7'), ('mamba-2', None))
    """
    use, separator, body = name.partition(" in ")
    return use, body if separator else None


def at_scale(name: str, scale: str | None) -> str:
    """Return what the study `name` is called at a scale, None where it has one size only.

    >>> at_scale("quickstart", None), at_scale("limited-zoo", "laptop")
    ('quickstart', 'limited-zoo at scale laptop')
    """
    return name if scale is None else f"{name} at scale {scale}"
