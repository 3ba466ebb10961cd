"""What a person reads: one HTML page with its figures, and a table for the terminal."""

from basecap.report.page import write_report
from basecap.report.terminal import terminal_table

__all__ = ["terminal_table", "write_report"]
