"""What rows begin with alike is computed once: counted by hand, against rows alone, and as every rank of a shared row sees it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.data.expert_routes import routes_of, table_of
from pipelinerl.errors import DataError
from pipelinerl.messages import Nodes
from tests.trainer.tiny import make_batch, make_model
from trainer.data.split import split_by_gradient
from trainer.model.lora import Adapters
from trainer.rows import trie
from trainer.rows.arrange import arrange
from trainer.rows.packed_row import ContextShard, PackedRow

Part = tuple[np.ndarray, bool]
"""Tokens, and whether they have a loss."""
Sample = tuple[np.ndarray, np.ndarray]
"""[L] tokens, [L] which of them have a loss."""


class Shapes:
    """Rows of episodes, as clients would send them who know of no graph: each with all that stands before it."""

    def __init__(self, *, vocabulary: int = 50_000) -> None:
        self._generator = np.random.default_rng(0)
        self._vocabulary = vocabulary

    def tokens(self, num: int) -> np.ndarray:
        return self._generator.integers(2, self._vocabulary, num).astype(np.int32)

    def group(self, prompt: int, completion: int, num: int) -> list[Sample]:
        shared = (self.tokens(prompt), False)
        return [sample(shared, (self.tokens(completion), True)) for _ in range(num)]

    def tree(self, prompt: int, turns: int, num: int, length: int) -> list[Sample]:
        """Shared turns, whose loss is in the first row, then branches."""
        trunk = [(self.tokens(prompt), False)]
        for _ in range(turns):
            trunk += [(self.tokens(length), True), (self.tokens(length), False)]
        rows = [[(ids, has_loss and not number) for ids, has_loss in trunk] for number in range(num)]
        return [sample(*row, (self.tokens(length), True)) for row in rows]

    def turns(self, prompt: int, num: int, said: int, replied: int) -> list[Sample]:
        """A row for each turn, which repeats those before."""
        rows, context = [], [(self.tokens(prompt), False)]
        for _ in range(num):
            turn = self.tokens(said)
            rows.append(sample(*context, (turn, True)))
            context += [(turn, False), (self.tokens(replied), False)]
        return rows

    def sub_agents(self, prompt: int, num: int, length: int) -> list[Sample]:
        own, shared = self.tokens(prompt), self.tokens(prompt)
        rows = [sample((shared, False), (self.tokens(length // 2), False), (self.tokens(length), True)) for _ in range(num)]
        return [sample((own, False), (self.tokens(length), True)), *rows]


def sample(*parts: Part) -> Sample:
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([np.full(len(ids), has_loss) for ids, has_loss in parts])


def lay_out(samples: Sequence[Sample], **options: object) -> PackedRow:
    row = arrange(
        np.concatenate([ids for ids, _ in samples]),
        loss_mask=np.concatenate([mask for _, mask in samples]),
        lengths=np.array([len(ids) for ids, _ in samples], np.int32),
        names=[f"rollout-{number}" for number in range(len(samples))],
        **options,  # pyright: ignore[reportArgumentType]
    )
    assert row is not None
    return row


TABLE = {
    "group of 8, 512 + 512": (lambda of: of.group(512, 512, 8), 8_184, 4_600),
    "4 shared turns, 8 branches": (lambda of: of.tree(512, 4, 8, 256), 22_520, 4_600),
    "16 turns, a row each": (lambda of: of.turns(512, 16, 64, 64), 24_560, 2_495),
    "8 sub-agents, one prompt": (lambda of: of.sub_agents(512, 8, 256), 7_927, 4_343),
}
"""By hand: the sum of rows less a token each, and each shared stretch once (the last: 767 + 512 + 8 * 383)."""


@pytest.mark.parametrize("name", TABLE)
def test_tokens_computed_are_those_counted_by_hand(name: str) -> None:
    make, linear, once = TABLE[name]
    samples = make(Shapes())
    assert sum(len(lay_out([one]).token_ids) for one in samples) == linear
    row = lay_out(samples)
    assert len(row.token_ids) == once
    assert len(row.targets) == sum(int(mask.sum()) for _, mask in samples)


def test_a_nested_beginning_is_a_prefix_of_prefixes() -> None:
    """1 2 3 begin all, 4 5 two of them: with branches from two tokens on, 6 7 see 1 2 3 4 5 and 8 sees 1 2 3."""
    rows = [([1, 2, 3, 4, 5, 6, 7, 9]), ([1, 2, 3, 4, 5, 7, 9]), ([1, 2, 3, 8, 9])]
    with mock.patch.object(trie, "LEAST", 2):
        row = lay_out([(np.array(ids, np.int32), np.arange(len(ids)) >= 3) for ids in rows])
    assert row.token_ids.tolist() == [1, 2, 3, 8, 4, 5, 7, 6, 7]
    assert row.positions.tolist() == [0, 1, 2, 3, 3, 4, 5, 5, 6]
    seen = [row.token_ids[block.prefix].tolist() for block in row.blocks if block.prefix is not None]
    assert seen == [[1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]


def test_little_that_rows_share_by_chance_is_computed_apart_and_equal_rows_once() -> None:
    head, tail = [1, 2], [3] * (trie.LEAST - 1)
    ids = [[*head, *tail, 5, 9], [*head, *tail, 6, 9], [*head, *tail, 6, 9], [1, 8, 9]]
    row = lay_out([(np.array(one, np.int32), np.arange(len(one)) >= 2) for one in ids])
    assert [(block.num, block.length, block.prefix_length) for block in row.blocks] == [(2, 2, 0), (2, trie.LEAST, 2)]
    assert len(row.targets) == 3 * (trie.LEAST + 1) + 1


def test_a_first_token_with_a_loss_is_refused_by_name() -> None:
    nodes = Nodes(parents=np.array([-1, -1, 1], np.int32), lengths=np.array([2, 1, 1], np.int32))
    with pytest.raises(DataError, match="rollout-1: its first token has a loss"):
        lay_out([(np.array([1, 2]), np.array([False, True])), (np.array([1, 2]), np.array([True, True]))], nodes=nodes)


# --- a graph in place of rows ---


def as_graph() -> tuple[Sample, Nodes, list[Sample]]:
    """An episode of nodes P T(P) a(T) U(a) b(T) V(b) Q W(Q), where T U V W were sampled, and the rows P T a U, P T b V, Q W."""
    of = Shapes(vocabulary=60)
    p, t, a, u, b, v, q, w = (of.tokens(num) for num in (5, 4, 3, 6, 2, 5, 4, 3))
    q[0], b[0] = p[0] ^ 1, a[0] ^ 1  # nothing is shared by chance
    nodes = Nodes(parents=np.array([-1, 0, 1, 2, 1, 4, -1, 6], np.int32), lengths=np.array([5, 4, 3, 6, 2, 5, 4, 3], np.int32))
    whole = sample((p, False), (t, True), (a, False), (u, True), (b, False), (v, True), (q, False), (w, True))
    first = sample((p, False), (t, True), (a, False), (u, True))
    return whole, nodes, [first, sample((p, False), (t, False), (b, False), (v, True)), sample((q, False), (w, True))]


def test_a_graph_is_computed_as_its_rows_are_and_each_token_once(folders: dict[str, Path]) -> None:
    whole, nodes, rows = as_graph()
    with mock.patch.object(trie, "LEAST", 1):
        graph, linear = lay_out([whole], nodes=nodes), lay_out(rows)
    assert sorted(graph.token_ids.tolist()) == sorted(linear.token_ids.tolist())
    assert len(graph.token_ids) == len(whole[0]) - 3, "all but the last of each row"
    assert graph.trained.tolist() == np.flatnonzero(whole[1]).tolist()
    assert graph.targets.tolist() == linear.targets.tolist() == whole[0][whole[1]].tolist()
    model = make_model(folders["qwen3"])
    with torch.no_grad():
        assert float((model.logprobs(graph)[0] - model.logprobs(linear)[0]).abs().max()) < 5e-6


def test_nodes_go_with_their_samples_where_a_row_is_split() -> None:
    whole, nodes, _ = as_graph()
    (ids, mask), num = whole, len(whole[0])
    columns = {"logprobs": np.zeros(num), "versions": np.where(mask, 0, -1), "reward": np.array(1.0), "truncated": np.array(False)}
    samples = [{"token_ids": ids, "loss_mask": mask, "advantages": np.where(mask, value, 0.0), **columns} for value in (1.0, 0.0, 2.0)]
    three = {"parents": [nodes.parents + np.where(nodes.parents < 0, 0, 8 * k) for k in range(3)], "lengths": [nodes.lengths] * 3}
    three_nodes = Nodes(**{name: np.concatenate(parts).astype(np.int32) for name, parts in three.items()})
    batch = msgspec.structs.replace(make_batch(samples), nodes=three_nodes)
    with_gradient, without = split_by_gradient(batch)
    assert without.nodes is not None
    assert without.nodes.parents.tolist() == nodes.parents.tolist()
    assert with_gradient.nodes is not None
    assert with_gradient.nodes.parents.tolist() == [*nodes.parents.tolist(), -1, 8, 9, 10, 9, 12, -1, 14]
    assert with_gradient.nodes.lengths.tolist() == [*nodes.lengths.tolist()] * 2


# --- equal to rows alone ---

SHAPES = {
    "tree": lambda of: of.tree(20, 2, 4, 8),
    "turns": lambda of: of.turns(12, 6, 6, 5),
    "sub-agents": lambda of: of.sub_agents(20, 4, 12),
    "group": lambda of: [*of.group(16, 10, 5), *of.group(40, 10, 3)],
}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3 with adapters"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_and_gradients_are_those_of_rows_alone(folders: dict[str, Path], shape: str, family: str) -> None:
    samples = SHAPES[shape](Shapes(vocabulary=60))
    options: dict[str, Any] = {}
    if "adapters" in family:
        options["adapters"] = Adapters(rank=3, alpha=6.0, targets=("q_proj", "v_proj"), seed=1)
    model = make_model(folders[family.split()[0]], **options)
    with torch.no_grad():  # what starts at nothing has no gradient to compare
        for name, parameter in model.module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    alone = torch.cat([model.logprobs(lay_out([one]))[0] for one in samples])
    with mock.patch.object(trie, "LEAST", 2):
        row = lay_out(samples)
    assert len(row.token_ids) < sum(len(ids) - 1 for ids, _ in samples)
    packed = model.logprobs(row)[0]
    assert float((packed - alone).detach().abs().max()) <= 5e-6
    weights = torch.linspace(-1, 1, len(alone))
    expected, got = (
        torch.cat([gradient.flatten() for gradient in torch.autograd.grad((logprobs * weights).sum(), parameters)])
        for logprobs in (alone, packed)
    )
    assert float((got - expected).abs().max() / expected.abs().max()) <= 2e-6


def test_what_other_experts_computed_is_not_shared(folders: dict[str, Path]) -> None:
    """Two rows with the same prompt and sampled beginning, of which the engine sent one sampled token elsewhere: only the prompt is one."""
    of = Shapes(vocabulary=60)
    prompt, said = of.tokens(4), of.tokens(6)
    samples = [sample((prompt, False), (said, True), (of.tokens(3), True)) for _ in range(2)]
    table = np.zeros((26, 2, 2), np.uint8)
    table[:, :, 1] = 1
    same, other = table.copy(), table.copy()
    other[13 + 5] = [[2, 3], [2, 3]]
    model = make_model(folders["qwen3_moe"], replay_routing=True)

    def logprobs(routes: np.ndarray) -> tuple[int, torch.Tensor, torch.Tensor]:
        with mock.patch.object(trie, "LEAST", 2), torch.no_grad():
            row = lay_out(samples, routes=table_of(routes_of(routes)))
            alone = [lay_out([one], routes=routes[13 * k : 13 * k + 13]) for k, one in enumerate(samples)]
            return len(row.token_ids), model.logprobs(row)[0], torch.cat([model.logprobs(one)[0] for one in alone])

    num, packed, alone = logprobs(same)
    assert num == 4 + 6 + 2 * 2
    assert float((packed - alone).abs().max()) <= 5e-6
    num, packed, alone = logprobs(other)
    assert num == 4 + 2 * (6 + 2)
    assert float((packed - alone).abs().max()) <= 5e-6


# --- every rank of a shared row ---


def contexts(parts: Sequence[PackedRow]) -> list[list[int]]:
    """The tokens that each token with a loss is predicted from, as attention would see them, in the order of the packed row."""
    everywhere = torch.cat([part.token_ids for part in parts])
    found: list[list[int]] = []
    for part in parts:
        sees: dict[int, list[int]] = {}
        for block in part.blocks:
            before = None if block.prefix is None else block.prefix.view(block.num, block.prefix_length)
            for number in range(block.num):
                first = block.start + number * block.length
                seen = [] if before is None else everywhere[before[number]].tolist()
                for place in range(first, first + block.length):
                    seen = [*seen, int(part.token_ids[place])]
                    sees[place] = seen
                    assert int(part.positions[place]) == len(seen) - 1
        found += [sees[int(source)] for source in part.sources]
    order = parts[0].order
    return found if order is None else [found[place] for place in order.tolist()]


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=2, max_size=14), st.integers(1, 13)), min_size=1, max_size=12),
    least=st.integers(1, 5),
    num=st.sampled_from([1, 2, 4]),
)
def test_every_token_is_predicted_from_what_stands_before_it(rows: list[tuple[list[int], int]], least: int, num: int) -> None:
    samples = [(np.array(ids, np.int32), np.arange(len(ids)) >= min(prompt, len(ids) - 1)) for ids, prompt in rows]
    with mock.patch.object(trie, "LEAST", least):
        parts = [lay_out(samples, context_shard=ContextShard(index=index, num=num)) for index in range(num)]
    expected = [ids[:place].tolist() for ids, mask in samples for place in np.flatnonzero(mask)]
    assert contexts(parts) == expected


@pytest.mark.parametrize("num", [1, 2, 4])
def test_every_token_of_a_graph_is_predicted_from_its_path(num: int) -> None:
    whole, nodes, _ = as_graph()
    plain = Shapes(vocabulary=60).group(4, 3, 1)[0]
    both = Nodes(
        parents=np.append(-1, np.where(nodes.parents < 0, -1, nodes.parents + 1)).astype(np.int32),
        lengths=np.append(7, nodes.lengths).astype(np.int32),
    )
    lay = functools.partial(lay_out, [plain, whole], nodes=both)
    parts = [lay(context_shard=ContextShard(index=index, num=num)) for index in range(num)]
    ids, (p, t, a, u, b, v, q, w) = whole[0], np.split(np.arange(32), np.cumsum(nodes.lengths)[:-1])
    paths = [[p, t], [p, t, a, u], [p, t, b, v], [q, w]]
    expected = [plain[0][:place].tolist() for place in (4, 5, 6)]
    for path in paths:
        line = ids[np.concatenate(path)].tolist()
        expected += [line[:place] for place in range(len(line) - len(path[-1]), len(line))]
    assert contexts(parts) == expected
