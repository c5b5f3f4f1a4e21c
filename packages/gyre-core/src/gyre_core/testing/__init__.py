"""Conformance suites and fakes for authors of plugins. Needs the extra "testing"."""
