"""The arrays of running sequences, against plain lists of each one's tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pipelinerl.engine.columns import NO_ROW, Columns


@dataclasses.dataclass
class Plain:
    """One sequence, token by token."""

    num_prompt_tokens: int
    kv_version: int
    chunk_tokens: int
    tokens: list[tuple[int, float, int]] = dataclasses.field(default_factory=list)
    kv_versions: list[int] = dataclasses.field(default_factory=list)
    """Of every token whose keys and values are cached, the prompt's too."""
    num_told: int = 0


def open_one(columns: Columns, plain: dict[str, Plain], name: str, *, version: int, prompt: int = 3, chunk_tokens: int = 0) -> None:
    columns.open(name, num_prompt_tokens=prompt, version=version, chunk_tokens=chunk_tokens)
    plain[name] = Plain(prompt, version, chunk_tokens, kv_versions=[version] * prompt)


def sampled(chance: np.random.Generator, columns: Columns, plain: dict[str, Plain], names: list[str], versions: int | np.ndarray) -> None:
    token_ids = chance.integers(0, 1 << 20, len(names), dtype=np.int32)
    logprobs = -chance.random(len(names), dtype=np.float32)
    rows = columns.rows_of(names)
    columns.append(rows, token_ids=token_ids, logprobs=logprobs, versions=versions)
    by_name = np.broadcast_to(versions, len(names)).tolist()
    for name, token_id, logprob, version in zip(names, token_ids.tolist(), logprobs.tolist(), by_name, strict=True):
        plain[name].tokens.append((token_id, logprob, version))
        plain[name].kv_versions.append(version)
    due = [name for name in names if 0 < plain[name].chunk_tokens <= len(plain[name].tokens) - plain[name].num_told]
    assert columns.to_tell(rows) == due
    for name in due:
        start, told = columns.untold(name)
        assert (start, told.tolist()) == (plain[name].num_told, [token for token, _, _ in plain[name].tokens[start:]])
        plain[name].num_told = len(plain[name].tokens)


def assert_same(found: tuple[np.ndarray, np.ndarray, np.ndarray], plain: Plain) -> None:
    assert [column.dtype for column in found] == [np.int32, np.float32, np.int32]
    assert list(zip(*(column.tolist() for column in found), strict=True)) == plain.tokens


def assert_same_staleness(columns: Columns, plain: dict[str, Plain], version: int) -> None:
    for most, mean in ((None, None), (1, None), (None, 1.25), (2, 1.75)):
        found = columns.staler_than(version, max_staleness=most, max_mean_staleness=mean)
        assert found == [
            name
            for name, one in plain.items()
            if (most is not None and version - one.kv_version > most)
            or (mean is not None and version - sum(one.kv_versions) / len(one.kv_versions) > mean)
        ]
    for newest in range(version):
        assert columns.newer_than(newest) == [name for name, one in plain.items() if one.tokens and one.tokens[-1][2] > newest]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_runs_ends_and_is_recomputed_the_columns_are_those_of_plain_lists(seed: int) -> None:
    """More sequences, and longer ones, than there is room for at the beginning; some of a pass sampled under versions of their own."""
    chance = np.random.default_rng(seed)
    columns, plain = Columns(), dict[str, Plain]()
    version = num_opened = 0
    for step in range(240):
        while len(plain) < 24 and chance.random() < 0.6:
            chunk_tokens = int(chance.choice([0, 0, 3, 7]))
            open_one(columns, plain, f"{num_opened}", version=version, prompt=int(chance.integers(1, 9)), chunk_tokens=chunk_tokens)
            num_opened += 1
        names = [name for name in plain if chance.random() < 0.9]
        versions = version if step % 2 else chance.integers(0, version + 1, len(names), dtype=np.int32)
        sampled(chance, columns, plain, names, versions)
        for name in [name for name in plain if chance.random() < 0.02]:
            assert_same(columns.close(name), plain.pop(name))
        if step % 20 == 19:
            version += 1
            assert_same_staleness(columns, plain, version)
            again = [name for name in plain if chance.random() < 0.3]
            places, num_tokens = columns.recompute(again, version)
            assert places == [len(plain[name].tokens) for name in again]
            assert num_tokens == sum(len(plain[name].kv_versions) for name in again)
            for name in again:
                plain[name].kv_version, plain[name].kv_versions = version, [version] * len(plain[name].kv_versions)
    assert max(len(one.tokens) for one in plain.values()) > 64
    for name in list(plain):
        assert_same(columns.close(name), plain.pop(name))
    assert num_opened > 24, "rows were used again"


def test_a_sequence_that_is_not_open_has_no_row_and_what_was_taken_out_stays_as_it_was() -> None:
    columns, plain, chance = Columns(), dict[str, Plain](), np.random.default_rng(0)
    open_one(columns, plain, "a", version=0)
    sampled(chance, columns, plain, ["a"], 0)
    assert columns.rows_of(["b", "a"]).tolist() == [NO_ROW, columns.rows_of(["a"])[0]]
    taken = columns.close("a")
    assert columns.rows_of(["a"]).tolist() == [NO_ROW]
    open_one(columns, plain | {}, "b", version=1)
    columns.append(columns.rows_of(["b"]), token_ids=np.array([7]), logprobs=np.array([-9.0]), versions=1)
    assert_same(taken, plain["a"])
