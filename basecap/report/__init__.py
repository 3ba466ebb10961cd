"""What a person reads: one HTML page with its figures, and a table for the terminal."""

from basecap.report.export import write_tables
from basecap.report.images import ImageFormat
from basecap.report.joined_section import joined_sentences, joined_sheets
from basecap.report.live import write_live_report
from basecap.report.page import Report, write_report
from basecap.report.terminal import terminal_table

__all__ = [
    "ImageFormat",
    "Report",
    "joined_sentences",
    "joined_sheets",
    "terminal_table",
    "write_live_report",
    "write_report",
    "write_tables",
]
