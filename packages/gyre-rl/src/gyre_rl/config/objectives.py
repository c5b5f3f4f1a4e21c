"""The trainer's objective, where a plugin brings it.

A trainer that computes gyre-loss's objectives has the options `objective` (a name of `gyre_loss.named`, or
"module:Class") and `objective_options`. Invariant: a name that an installed plugin registers is replaced by the class
it stands for, so that the trainer's processes need the module and no plugin manager, and the run's record says which
class it was.
"""

from __future__ import annotations

import dataclasses

from gyre_core import Kind, PluginManager

from gyre_rl.config.schema import RunConfig


def with_objective(config: RunConfig, plugins: PluginManager) -> RunConfig:
    """The same run with the objective of a plugin named by its class."""
    options = config.trainer.options
    name = getattr(options, "objective", None)
    named = {c.registration.name: c.registration.target for c in plugins.components(Kind.OBJECTIVE)}
    if name not in named or not dataclasses.is_dataclass(options) or isinstance(options, type):
        return config
    chosen = dataclasses.replace(config.trainer, options=dataclasses.replace(options, objective=named[name]))
    return dataclasses.replace(config, trainer=chosen)
