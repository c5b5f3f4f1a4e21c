"""What the plugin registers, and that naming it imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest
from gyre_core import ComponentContext, ConfigError, Kind, PluginManager
from gyre_harnesses import plugin


async def test_the_plugin_brings_what_it_names(tmp_path):
    manager = PluginManager()
    manager.add(plugin)
    context = ComponentContext(str(tmp_path), "test")
    assert {c.registration.name for c in manager.components()} >= {"shell", "local"}
    for component in manager.components():
        if component.missing:
            continue
        kind, name = component.registration.kind, component.registration.name
        assert kind in (Kind.HARNESS, Kind.SANDBOX) or name == "verifiers"
        assert manager.load(kind, name) is not None
        assert manager.options_type(kind, name) is not None
    assert manager.create(Kind.HARNESS, "shell", {"tools": ("bash",)}, context).options.tools == ("bash",)

    with pytest.raises(ConfigError, match="argv"):  # no program is a mistake of the recipe, not of every execution
        manager.create(Kind.HARNESS, "command", {}, context)


def test_listing_is_light():
    code = (
        "import sys, gyre_harnesses.plugin as p; list(p.gyre_register()); "
        "heavy = {'aiohttp', 'asyncio', 'torch', 'tarfile'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
