"""Tables of logits take what a device has to spare; figures worked by hand, `torch.cuda` answering made-up ones."""

from __future__ import annotations

import pytest
import torch

from trainer.model import head, room

GIB, MIB = 1 << 30, 1 << 20
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("free", "kept_by_torch", "piece"),
    [
        (64 * GIB, 0, GIB),  # a 32nd of it is 2 GiB, more than a piece needs
        (30 * GIB, 0, 512 * MIB),  # 960 MiB, rounded down to a power of two
        (20 * GIB, 12 * GIB, GIB),  # what torch keeps in reserve is free as well
        (GIB // 2, 0, 32 * MIB),  # 16 MiB would be thin products
        (0, 0, 32 * MIB),
    ],
)
def test_a_piece_takes_a_share_of_what_is_free_on_a_device(
    monkeypatch: pytest.MonkeyPatch, free: int, kept_by_torch: int, piece: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: kept_by_torch + 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 3 * GIB)
    assert room.piece_bytes(CUDA) == piece
    assert room.kept_bytes(CUDA) == 8 * piece


def test_the_words_of_qwen3_are_cut_into_five_pieces_on_a_free_device_and_149_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: 64 * GIB)
    assert -(-8192 // head.num_tokens(151_936, device=CUDA)) == 5
    assert -(-8192 // head.num_tokens(151_936, device=torch.device("cpu"))) == 149
