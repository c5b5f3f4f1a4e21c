"""The embedded engine and trainer of Gyre in plain torch."""
