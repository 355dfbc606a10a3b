"""Tables of small integers that say to which experts of a mixture each token was sent, and their form on the wire.

A table is [rows, layers, k], of the smallest unsigned integers that hold every expert's number and one more: the largest of the type stands
for "not known". Rows are tokens; the last token of a sequence was never sent anywhere, so the table of a sequence is one row short.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipelinerl.messages import Routes

Table = npt.NDArray[np.unsignedinteger]


def dtype_for(num_experts: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest type with room for so many experts and the mark of an unknown one."""
    return np.dtype(np.uint8 if num_experts < 256 else np.uint16)


def routes_of(table: Table) -> Routes:
    """Return a table as it travels."""
    _, num_layers, top_k = table.shape
    experts = np.frombuffer(np.ascontiguousarray(table).tobytes(), np.uint8)
    return Routes(num_layers=num_layers, top_k=top_k, width=table.dtype.itemsize, experts=experts)


def table_of(routes: Routes) -> Table:
    """Return a table that travelled; it shares the memory of the message."""
    return routes.experts.view(f"<u{routes.width}").reshape(-1, routes.num_layers, routes.top_k)


def unknown(table: Table) -> npt.NDArray[np.bool_]:
    """Return [rows], true where a token's experts are not known."""
    return (table == np.iinfo(table.dtype).max).any((1, 2))


def joined(parts: Sequence[Routes | None], *, lengths: Sequence[int]) -> Routes | None:
    """Return sequences of these lengths end to end, each filled up with unknown rows; None where nothing is known of any of them."""
    known = next((routes for routes in parts if routes is not None), None)
    if known is None:
        return None
    dtype = np.dtype(f"<u{known.width}")
    whole = np.full((sum(lengths), known.num_layers, known.top_k), np.iinfo(dtype).max, dtype)
    start = 0
    for routes, length in zip(parts, lengths, strict=True):
        if routes is not None:
            table = table_of(routes)
            whole[start : start + len(table)] = table
        start += length
    return routes_of(whole)


def num_unrouted(routes: Routes | None, *, lengths: npt.NDArray[np.int32]) -> int:
    """Return how many tokens of a packed row of samples of these lengths have unknown experts; the last of each sample has none, and is
    left out."""
    if routes is None:
        return int(lengths.sum()) - len(lengths)
    return int(unknown(table_of(routes)).sum()) - len(lengths)
