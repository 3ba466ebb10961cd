"""The analysis of studies of text: gaps to the reference with intervals, verdicts and their reasons."""
