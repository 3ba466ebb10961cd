"""Records of Parquet files, which need the library pyarrow."""

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, BinaryIO

from basecap.errors import ConfigError, DataError, nearest
from basecap.system.foreign import CHUNK, refuse_expansion

#: Rows that are decoded at a time. Few, as each may be a long document, or a value that the file holds once.
ROWS = 8


def rows(name: PurePath, file: BinaryIO, keys: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """Yield the records of a Parquet file, with those of its columns that hold the text or one of the dotted `keys`.

    Columns of lists are left out, and all others taken where `keys` is None.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is damaged, has no column of text, or expands as no text does.
    """
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"{name} is a Parquet file, which needs the pyarrow library; install basecap[parquet]."
        ) from error

    try:
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=CHUNK)
        columns = _columns(name, table.schema_arrow, keys, arrow.types)
        compressed, expanded = 0, 0
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            chunks = [group.column(place) for place in range(group.num_columns)]
            compressed += sum(chunk.total_compressed_size for chunk in chunks)
            refuse_expansion(name, compressed, sum(chunk.total_uncompressed_size for chunk in chunks))
            for batch in table.iter_batches(ROWS, row_groups=[number], columns=columns, use_threads=False):
                records = batch.to_pylist()
                expanded += sum(len(record["text"] or "") for record in records)  # a file may hold many of them once
                refuse_expansion(name, compressed, expanded)
                yield from records
    except (arrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the file, not of its content
            raise
        reason = str(error).partition("\n")[0]
        raise DataError(f"{name} is damaged, or no Parquet file ({reason}); download the file again.") from error


def _columns(name: PurePath, schema: Any, keys: Sequence[str] | None, types: Any) -> list[str]:
    """Return the names of the columns to read; raises DataError when there is no column of text."""
    if "text" not in schema.names:
        raise DataError(
            f'{name} has no column "text"; rename the column that holds the text: {nearest("text", schema.names)}'
        )
    kind = schema.field("text").type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise DataError(f'the column "text" of {name} holds values of type {kind}; it should hold strings.')
    found = ["text"]
    for field in schema:
        asked = keys is None or any(f"{key}.".startswith(f"{field.name}.") for key in keys)
        nested = types.is_list(field.type) or types.is_large_list(field.type) or types.is_map(field.type)
        if asked and not nested and field.name != "text":
            found.append(field.name)
    return found
