"""What holds for all tests: hypothesis draws the same examples in every run, and none is too slow; a test that takes
minutes has more of them before it is taken for one that hangs.

A check must not fail of an example that no change has brought about. Others are sought by
`pytest --hypothesis-profile=explore`; what they find becomes a test of its own.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("commit", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("commit")

SLOW_S = 1200
"""Most that a test marked slow may take that names no limit of its own, also on a machine with other work."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The limit of slow tests."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))
