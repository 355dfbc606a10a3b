"""The layout an engine asks for, and what would break a swap, found at start; on small modules that load as vLLM's do."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from pipelinerl.engine.vllm.experts import PLAIN_ON_DEVICE
from pipelinerl.engine.vllm.weights import obstacles_of, plan_of, plan_of_rank, whole_layout
from pipelinerl.errors import ConfigError
from pipelinerl.weights.base import num_bytes, views
from pipelinerl.weights.swap import SwapMode, make_swap


class Model(torch.nn.Module):
    """An embedding, a head tied to it by memory but not by identity, and a layer that fuses two checkpoint tensors."""

    def __init__(self, *, splits: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = torch.nn.Parameter(self.embed.weight.data)
        self.fused = torch.nn.Linear(4, 10, bias=False)
        self.requires_grad_(False)
        self._splits = splits

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            match name:
                case "embed":
                    self.embed.weight.copy_(tensor)
                case "q" if self._splits:
                    self.fused.weight[:3].copy_(tensor[3:])
                    self.fused.weight[3:6].copy_(tensor[:3])
                case "q":  # in pieces, as vLLM loads what a checkpoint has fused itself
                    self.fused.weight[:2].copy_(tensor[:2])
                    self.fused.weight[2:6].copy_(tensor[2:])
                case "k":
                    self.fused.weight[6:].copy_(tensor)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"embed": torch.randn(6, 4), "k": torch.randn(4, 4), "q": torch.randn(6, 4)}, tmp_path / "model.safetensors")
    return tmp_path


def test_parts_of_a_fused_parameter_lie_side_by_side(folder: Path):
    _, layout = plan_of(Model(), folder=folder)
    assert {tensor.name: (tensor.offset_bytes, tensor.num_bytes) for tensor in layout} == {
        "embed": (0, 96),
        "q": (256, 96),
        "k": (352, 64),
    }


@pytest.mark.parametrize("mode", list(SwapMode))
def test_a_policy_reaches_every_parameter_and_a_twin_of_one_too(folder: Path, mode: SwapMode):
    model = Model()
    parameters, layout = plan_of(model, folder=folder)
    buffer = torch.zeros(num_bytes(layout), dtype=torch.uint8)
    values = {"embed": 1.0, "q": 2.0, "k": 3.0}
    for name, view in views(buffer, layout).items():
        view.fill_(values[name])
    commit = make_swap(mode, parameters)
    commit.stage(buffer)
    commit.commit()
    assert model.embed.weight.eq(1.0).all()
    assert model.head.weight.eq(1.0).all(), "the head is tied: an old copy of it would sample from old weights for ever"
    assert model.fused.weight[:6].eq(2.0).all()
    assert model.fused.weight[6:].eq(3.0).all()


def test_a_parameter_that_is_filled_in_parts_of_a_tensor_or_not_at_all_is_found_at_start(folder: Path):
    with pytest.raises(ConfigError, match=r"vLLM splits or reorders q when it loads"):
        plan_of(Model(splits=True), folder=folder)
    model = Model()
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"2 of 4 parameters of .* are not filled, or not once, by its checkpoint: \['extra.weight'"):
        plan_of(model, folder=folder)


def test_what_is_loaded_is_not_written_a_second_time(folder: Path):
    class Filled(Model):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            self.fused.weight.zero_()
            self.head.weight[4:].fill_(0.0)
            super().load_weights(weights)

    model = Filled()
    before = [parameter.clone() for parameter in model.parameters()]
    plan_of(model, folder=folder)
    assert all(now.equal(then) for now, then in zip(model.parameters(), before, strict=True))


def test_what_was_computed_of_a_checkpoint_tensor_is_no_copy_of_it(folder: Path):
    class Sum(Model):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, tensor + 1 if name == "k" else tensor) for name, tensor in weights)

    with pytest.raises(ConfigError, match=r"not filled, or not once, by its checkpoint: \['fused\.weight'\]"):
        plan_of(Sum(), folder=folder)


def test_a_parameter_that_is_computed_with_while_it_is_filled_is_found_at_start(folder: Path):
    class Scaled(Model):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            self.fused.weight.mul_(2.0)

    with pytest.raises(ConfigError, match=r"vLLM computes with fused\.weight while it fills it"):
        plan_of(Scaled(), folder=folder)


def test_parameters_that_share_a_part_of_their_memory_are_found_at_start(folder: Path):
    model, memory = Model(), torch.zeros(9, 4)
    model.embed.weight, model.head.weight = torch.nn.Parameter(memory[:6]), torch.nn.Parameter(memory[3:])
    with pytest.raises(ConfigError, match=r"embed\.weight and head\.weight share a part of their memory"):
        plan_of(model, folder=folder)


@pytest.mark.parametrize("mode", list(SwapMode))
def test_a_part_of_a_weight_in_another_order_moves_with_it(folder: Path, mode: SwapMode):
    """As the two halves of kv_b_proj that latent attention multiplies with, transposed."""
    model = Model()
    model.parts = torch.nn.ParameterList(
        [model.fused.weight.data[1:7].view(3, 2, 4).permute(1, 2, 0), model.fused.weight.data.T]  # pyright: ignore
    )
    parameters, layout = plan_of(model, folder=folder)
    assert [(one.offset_bytes, one.num_bytes, one.is_view) for one in parameters][2:] == [
        (0, 96, True),
        (256 + 16, 96, True),
        (256, 160, True),
    ]
    buffer = torch.zeros(num_bytes(layout), dtype=torch.uint8)
    policy = views(buffer, layout)
    for view in policy.values():
        view.copy_(torch.randn_like(view))
    commit = make_swap(mode, parameters)
    commit.stage(buffer)
    commit.commit()
    fused = torch.cat((policy["q"], policy["k"]))
    assert model.fused.weight.equal(fused)
    assert model.parts[0].equal(fused[1:7].view(3, 2, 4).permute(1, 2, 0))
    assert model.parts[1].equal(fused.T)


def test_a_plain_model_has_no_obstacles():
    assert obstacles_of(Model(), captures_graphs=False) == {mode: [] for mode in SwapMode}


def test_captured_graphs_and_kept_addresses_break_a_flip_and_nothing_else():
    model = Model()
    (reason,) = obstacles_of(model, captures_graphs=True)[SwapMode.POINTER]
    assert reason == "captured graphs keep the addresses of the parameters (enforce_eager is off)"
    model.fused.kept = model.fused.weight.data[:6]
    model.fused.register_buffer("also", model.embed.weight.data)
    found = obstacles_of(model, captures_graphs=False)
    assert found == {
        SwapMode.POINTER: ["fused.kept shares memory with fused.weight, and 1 more like it"],
        SwapMode.SPARSE: [],
        SwapMode.COPY: [],
    }


def test_parameters_in_a_devices_memory_are_not_pointed_into_the_hosts():
    found = obstacles_of(Model().to("meta"), captures_graphs=False)
    assert found == {
        SwapMode.POINTER: ["the parameters are in a device's memory, and published policies in the host's"],
        SwapMode.SPARSE: [],
        SwapMode.COPY: [],
    }


class Fp8LinearMethod:
    pass


class UnquantizedLinearMethod:
    moe_kernel = object()


class FlashInferExperts:
    """Named as vLLM's kernel that swaps gate and up."""


class TritonExperts:
    """Named as the one that leaves them."""


def test_on_a_device_only_experts_that_stay_as_they_were_loaded_take_policies():
    model = Model().to("meta")
    model.fused.quant_method = method = UnquantizedLinearMethod()  # pyright: ignore[reportArgumentType]
    method.moe_kernel = SimpleNamespace(fused_experts=FlashInferExperts())
    assert obstacles_of(model, captures_graphs=False)[SwapMode.COPY] == [
        "1 layers of experts are rearranged for their kernel, for example fused (FlashInferExperts):"
        " leave engine.options.moe_backend at triton"
    ]
    method.moe_kernel = SimpleNamespace(fused_experts=TritonExperts())
    assert obstacles_of(model, captures_graphs=False)[SwapMode.COPY] == []


def test_the_kernels_that_leave_experts_as_they_were_loaded_are_vllms_own_names():
    """Both wheels of vLLM have the same Python; what differs is which of it runs."""
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]) / "model_executor/layers/fused_moe/experts"  # pyright: ignore
    defined = set(re.findall(r"^class (\w+)\(", "".join(path.read_text() for path in folder.glob("*.py")), re.MULTILINE))
    assert set(PLAIN_ON_DEVICE) < defined
    assert "FlashInferExperts" in defined


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("cpu_linear", torch.nn.functional.relu, "1 layers compute with a packed copy of their weight, for example fused"),
        ("quant_method", Fp8LinearMethod(), "1 layers are quantised, for example fused (Fp8LinearMethod): load an unquantised model"),
        (
            "quant_method",
            UnquantizedLinearMethod(),
            "1 layers of experts are rearranged for their kernel, for example fused (NoneType): no such model can be served here",
        ),
    ],
)
def test_layers_that_compute_with_something_else_than_their_parameters_break_every_way(name: str, value: object, said: str):
    model = Model()
    setattr(model.fused, name, value)
    found = obstacles_of(model, captures_graphs=False)
    for mode in SwapMode:
        (reason,) = found[mode]
        assert reason == said


# --- several ranks ask for the layout of one ---


class Rank(torch.nn.Module):
    """A rank of a model: its rows of `q`, `k` whole after them in one parameter, its columns of `o`, and two of four experts."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.rank, self.num_ranks = rank, num_ranks
        self.fused = torch.nn.Parameter(torch.zeros(4 // num_ranks + 2, 24), requires_grad=False)
        self.o = torch.nn.Parameter(torch.zeros(5, 4 // num_ranks), requires_grad=False)
        self.experts = torch.nn.Parameter(torch.zeros(4 // num_ranks, 3, 3), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(7), requires_grad=False)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        rows = 4 // self.num_ranks
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        for name, tensor in weights:
            match name:
                case "q":
                    self.fused[:rows].copy_(tensor[mine])
                case "k":
                    self.fused[rows:].copy_(tensor)
                case "o":
                    self.o.copy_(tensor[:, mine])
                case "norm":
                    self.norm.copy_(tensor)
                case _ if mine.start <= (number := int(name.removeprefix("expert"))) < mine.stop:
                    self.experts[number - mine.start].copy_(tensor)


def test_two_ranks_ask_for_the_layout_that_one_asks_for(tmp_path: Path) -> None:
    tensors = {"norm": torch.randn(7), "o": torch.randn(5, 4), "k": torch.randn(2, 24), "q": torch.randn(4, 24)}
    tensors |= {f"expert{number}": torch.randn(3, 3) for number in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    _, one = plan_of(Rank(0, 1), folder=tmp_path)
    assert [(tensor.name, tensor.offset_bytes) for tensor in one] == [
        ("q", 0),
        ("k", 384),
        ("o", 768),
        *((f"expert{number}", 1024 + 36 * number) for number in range(4)),
        ("norm", 1280),
    ]
    plans = [plan_of_rank(Rank(rank, 2), folder=tmp_path) for rank in range(2)]
    shapes, dtypes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}, dict.fromkeys(tensors, "float32")
    assert whole_layout([filled for _, _, filled in plans], shapes, dtypes) == one


def test_stages_of_a_pipeline_ask_for_it_too_and_a_tensor_of_both_lies_where_the_first_has_it() -> None:
    shapes = {"embed": (3, 4), "first": (2, 2), "second": (2, 2)}
    found = whole_layout(
        [{"embed": ["embed"], "a": ["first"]}, {"b": ["second"], "head": ["embed"]}], shapes, dict.fromkeys(shapes, "float32")
    )
    assert [(tensor.name, tensor.offset_bytes) for tensor in found] == [("embed", 0), ("first", 256), ("second", 512)]
