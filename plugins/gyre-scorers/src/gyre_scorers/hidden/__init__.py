"""Scorer `pytest`: a hidden suite on a fresh copy of the workspace, with results that printed text cannot forge."""
