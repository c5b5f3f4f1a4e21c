"""What holds for all tests: hypothesis draws the same examples in every run, and none is too slow.

A check must not fail of an example that no change has brought about. Others are sought by
`pytest --hypothesis-profile=explore`; what they find becomes a test of its own.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("commit", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("commit")
