"""`gyre plugin new`: writes a plugin package that works and passes its kind's conformance suite as it is."""

from gyre_rl.scaffold.write import KINDS, write_plugin

__all__ = ["KINDS", "write_plugin"]
