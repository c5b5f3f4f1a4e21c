"""A cell: one process that hosts an engine and a trainer and is one or the other at a time."""
