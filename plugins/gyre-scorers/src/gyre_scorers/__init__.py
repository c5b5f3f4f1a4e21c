"""Scorers with partial credit for Gyre."""
