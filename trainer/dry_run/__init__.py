"""A rank of any layout in one process, without the other ranks and without values: what it holds, and what it sends."""
