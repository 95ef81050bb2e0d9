"""What findings have in common: rows that are dataclasses, to be read as text, in a notebook, or by pandas."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from ..errors import ConfigurationError

if TYPE_CHECKING:
    import pandas


class Table:
    """Subclasses have ``rows``, dataclasses, and say with ``head`` and ``cells`` how a row is written."""

    rows: Sequence[Any]

    def head(self) -> list[str]:
        """Names of the columns of the text."""
        raise NotImplementedError

    def cells(self, row: Any) -> list[str]:
        """A row as text, one for each column."""
        raise NotImplementedError

    def title(self) -> str:
        """One line that says what the table shows."""
        return type(self).__name__

    def table(self) -> str:
        """All rows, as text."""
        return tabulate([self.cells(row) for row in self.rows], self.head(), disable_numparse=True)

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each row: name of an attribute of it -> value."""
        return [dataclasses.asdict(row) for row in self.rows]

    def to_dataframe(self) -> pandas.DataFrame:
        """A ``pandas.DataFrame`` with a line for each row and a column for each attribute of it.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigurationError(
                "a DataFrame needs pandas, which is not installed", expected="the package pandas", got=str(error),
                hint="pip install pandas; .to_dicts() gives the same rows without it",
            ) from error  # fmt: skip
        return pandas.DataFrame(self.to_dicts())

    def _repr_html_(self) -> str:
        cells = [self.cells(row) for row in self.rows]
        table = tabulate(cells, self.head(), tablefmt="html", disable_numparse=True)
        return f"<p>{html.escape(self.title())}</p>\n{table}"
