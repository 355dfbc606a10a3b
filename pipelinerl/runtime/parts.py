"""The share of one machine where processes of a run are spread over several."""

from __future__ import annotations


def share_of(part: str | None, *, count: int) -> range:
    """The numbers of part `K/N` of `count`: consecutive ones, as many in each part, or one more; of None all."""
    number, _, num_parts = (part or "0/1").partition("/")
    bounds = [count * index // int(num_parts) for index in (int(number), int(number) + 1)]
    return range(*bounds)


def engines_of(
    part: str | None, elsewhere: str | None, *, num_here: int, num_elsewhere: int, ids: str | None = None
) -> tuple[int, ...] | range:
    """The numbers of the engines of a process: its part of those that are started with the run, or of those that follow, elsewhere; or
    those that it is told, which have joined a live run."""
    if ids is not None:
        return tuple(int(number) for number in ids.split(","))
    if elsewhere is None:
        return share_of(part, count=num_here)
    own = share_of(elsewhere, count=num_elsewhere)
    return range(num_here + own.start, num_here + own.stop)
