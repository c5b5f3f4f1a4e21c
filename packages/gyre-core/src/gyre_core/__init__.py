"""Cells, roles, hooks, protocols and conformance suites of Gyre."""
