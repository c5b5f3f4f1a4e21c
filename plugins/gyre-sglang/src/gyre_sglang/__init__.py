"""SGLang as an engine of Gyre, over the server's public HTTP interface.

The server lives in an environment of its own (`environment.toml` describes one) and is started by the engine, or runs
already. Importing this package imports nothing of SGLang, torch or aiohttp.
"""
