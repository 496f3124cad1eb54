"""On a device: what loops do between forward, backward and ``step()``."""

from tests.core.test_between import *  # noqa: F403
