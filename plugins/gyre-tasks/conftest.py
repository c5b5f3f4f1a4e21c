"""Keeps pytest out of the sample tasks: their suites are data, run by scorers."""

collect_ignore = ["samples", "references"]
