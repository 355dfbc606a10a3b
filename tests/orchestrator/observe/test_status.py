"""The gauges of the moment: what cannot be read is absent, and ends no run."""

from __future__ import annotations

import resource

from orchestrator.observe.status import _resident_bytes


def test_the_memory_gauge_is_absent_where_there_is_no_descriptor_to_read_it_by() -> None:
    """As while strangers hold all of them; it is back once they are gone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # what is open stays open
    try:
        unread = _resident_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert unread is None
    assert (_resident_bytes() or 0) > 1 << 20
