"""What the server's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_server import RunningServer, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One server for a module's tests."""
    with running_server() as running:
        yield running
