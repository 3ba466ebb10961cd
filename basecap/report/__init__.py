"""What a person reads: one HTML page with its figures, and a table for the terminal."""

from basecap.report.analysed import Analysed, analysed
from basecap.report.bundle import without_charts
from basecap.report.export import Sheet, every_sheet, flattened, to_html, to_markdown, write_tables
from basecap.report.figures import Spec
from basecap.report.images import ImageFormat, image
from basecap.report.joined_section import joined_sentences, joined_sheets
from basecap.report.live import write_live_report
from basecap.report.page import Report, findings_html, write_report
from basecap.report.summary import Summary, summarise
from basecap.report.table_rows import numbers_of
from basecap.report.terminal import terminal_table

__all__ = [
    "Analysed",
    "ImageFormat",
    "Report",
    "Sheet",
    "Spec",
    "Summary",
    "analysed",
    "every_sheet",
    "findings_html",
    "flattened",
    "image",
    "joined_sentences",
    "joined_sheets",
    "numbers_of",
    "summarise",
    "terminal_table",
    "to_html",
    "to_markdown",
    "without_charts",
    "write_live_report",
    "write_report",
    "write_tables",
]
