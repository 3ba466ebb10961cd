"""Names of architectures, read without importing one."""


def split_body(name: str) -> tuple[str, str | None]:
    """Split "X in Y", the mixers of architecture X in block family Y, into the two; Y is None for a plain name.

    >>> split_body("transformer++ in rwkv-7"), split_body("mamba-2")
    (('transformer++', 'rwkv-7'), ('mamba-2', None))
    """
    use, separator, body = name.partition(" in ")
    return use, body if separator else None
