"""Ways to read another process's KV pool: one protocol, four carriers, chosen by probing (`choose.py`)."""
