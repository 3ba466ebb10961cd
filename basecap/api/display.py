"""Tables and figures of a report that notebooks display."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, overload

from basecap.errors import ConfigError
from basecap.report import ImageFormat, Sheet, Spec, flattened, image, to_html, to_markdown
from basecap.system.files import replacing

#: Type of a figure's description in Jupyter, which draws it where it knows this version of Vega-Lite.
VEGA_LITE_TYPE = "application/vnd.vegalite.v6+json"
#: Most rows that are displayed.
SHOWN = 60


@dataclass(frozen=True, repr=False)
class StudyTable(Sequence[dict[str, Any]]):
    """A table of a report: a sequence of rows, each a dict by the names of its columns.

    Numbers are those of the report in full; an interval has the columns NAME, NAME low and NAME high. Jupyter displays
    them rounded, as the report prints them. `pandas.DataFrame(table)` and `table.to_pandas()` convert it.
    """

    sheet: Sheet

    @property
    def name(self) -> str:
        """Its name in the study, and that of the files that `basecap report --tables` writes."""
        return self.sheet.name

    @property
    def columns(self) -> list[str]:
        """The keys of its rows."""
        return list(self._flat.columns)

    def to_pandas(self) -> Any:
        """Return it as a `pandas.DataFrame`; raises ConfigError when pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise ConfigError("pandas is not installed; install it with pip install pandas.") from error
        return pandas.DataFrame(self._rows, columns=self.columns)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    @cached_property
    def _flat(self) -> Sheet:
        return flattened(self.sheet)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        return [dict(zip(self._flat.columns, row, strict=True)) for row in self._flat.rows]

    def _first(self) -> tuple[Sheet, str]:
        """Return the rows that are displayed, and words about the others."""
        rows = self.sheet.rows
        left = f"{len(rows) - SHOWN:,} more rows" if len(rows) > SHOWN else ""
        return replace(self.sheet, rows=rows[:SHOWN]), left

    def _repr_html_(self) -> str:
        shown, left = self._first()
        return to_html(shown) + (f"<p>{left}</p>" if left else "")

    def __repr__(self) -> str:
        shown, left = self._first()
        return to_markdown(shown) + left


@dataclass(frozen=True, eq=False, repr=False)
class StudyFigure:
    """A figure of a report, which Jupyter displays.

    Attributes:
        name: in the study, and of the file that `basecap report --figures` writes.
        chart: its description in Vega-Lite, such as for `altair.Chart.from_dict`.
    """

    name: str
    chart: Spec

    def save(self, path: str | Path) -> Path:
        """Write it to a file and return the path; the suffix is the format: .svg, .pdf or .json (Vega-Lite).

        Raises:
            ConfigError: another suffix.
            DataError: the file cannot be written.
        """
        path = Path(path).expanduser()
        forms: dict[str, ImageFormat] = {f".{form}": form for form in get_args(ImageFormat)}
        if path.suffix == ".json":
            content = json.dumps(self.chart).encode()
        elif path.suffix in forms:
            content = image(self.chart, forms[path.suffix])
        else:
            raise ConfigError(f"figures are written as {', '.join(forms)} or .json; give {path} one of these suffixes.")
        with replacing(path) as file:
            file.write(content)
        return path

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        picture = image(self.chart, "svg").decode()
        return {VEGA_LITE_TYPE: self.chart, "image/svg+xml": picture, "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"StudyFigure({self.name})"
