"""What attention layers of vLLM compute from weights once these are loaded: computed anew in every commit, or refused by name.

Some attention layers compute with a second form of a weight, made once, by a hook that vLLM runs after it has loaded a model
(`process_weights_after_loading`). No checkpoint has that form and no policy brings it: left as it is, it would go on showing the weights
of the start. Three kinds are told apart, by running the hook a second time:

- It copies nothing from one memory to another: the form is a view of the weight, and moves with it (`weights.plan_of_rank`). Latent
  attention (MLA) of unquantised weights is of this kind: W_UV and W_UK_T are parts of kv_b_proj, transposed.
- It writes into memory that was there: the form is made anew by the same hook in every commit, where captured graphs have it. Attention
  sinks in float32, as FlashInfer wants them, are of this kind.
- It makes new memory, or cannot be run again: the model is refused. MLA packed for AMX, which lets go of kv_b_proj, is of this kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipelinerl.errors import ConfigError
from pipelinerl.weights.timeline import timeline_of

HOOK = "process_weights_after_loading"


class Derived:
    """The derived weights of a model. To be made before its policies are planned; `make_anew` ends a commit, between two forward passes."""

    def __init__(self, model: torch.nn.Module, *, dtype: torch.dtype) -> None:
        """`dtype` is the one that the model computes in. Raises `ConfigError` naming the layer whose second form no commit can follow."""
        if hasattr(model, HOOK):
            raise ConfigError(
                f"vLLM's {type(model).__name__} changes its weights once they are loaded, by a hook of its own ({HOOK}): a new policy would"
                " not pass through it. See docs/models.md"
            )
        self._dtype = dtype
        self._layers: list[Any] = []
        self.names: set[str] = set()
        """Parameters that no checkpoint fills, because the hooks do."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, layer in model.named_modules():
            if _may_derive(layer) and (written := _written_again(name, layer, dtype)):
                self._layers.append(layer)
                self.names |= {names[id(one)] for one in layer.parameters() if one.data_ptr() in written}

    def make_anew(self) -> None:
        """Make the derived weights of the policy that is in force."""
        if self._layers:
            with torch.no_grad():
                for layer in self._layers:
                    getattr(layer, HOOK)(self._dtype)
            timeline_of(next(_tensors_of(self._layers[0])).device).finish()


def _may_derive(layer: Any) -> bool:
    """True for attention that does more after loading than set scales which no checkpoint has to their defaults."""
    if not hasattr(layer, HOOK):
        return False
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.v1.attention.backend import AttentionImplBase

    if not is_deferred_attention_layer(layer):
        return False
    if getattr(type(layer), HOOK) is not Attention.process_weights_after_loading:
        return True
    return any(getattr(type(impl), HOOK) is not AttentionImplBase.process_weights_after_loading for impl in _impls_of(layer))


def _written_again(name: str, layer: Any, dtype: torch.dtype) -> set[int]:
    """Run the hook again, and return the addresses that it copies something else to. Raises `ConfigError` where it cannot be run again."""
    kind = f"{name} ({', '.join(type(part).__name__ for part in (layer, *_impls_of(layer)))})"
    before = [tensor.data_ptr() for tensor in _tensors_of(layer)]
    recorder = _CopyRecorder()
    try:
        with torch.no_grad(), recorder:
            getattr(layer, HOOK)(dtype)
    except Exception as error:  # whatever vLLM raises of a weight that it has let go of: the layer is named, with its words
        raise ConfigError(
            f"vLLM cannot make the second form of the weights of {kind} again: {type(error).__name__}: {error}. A new policy would not"
            ' reach it. Choose another engine.options.attention_backend; on a processor with AMX, "CPU_MLA" for latent attention'
        ) from error
    if [tensor.data_ptr() for tensor in _tensors_of(layer)] != before:
        raise ConfigError(
            f"vLLM makes the second form of the weights of {kind} in new memory each time: a new policy would reach neither captured graphs"
            " nor whoever has kept the old one. Choose another engine.options.attention_backend"
        )
    return recorder.written


def _impls_of(layer: Any) -> tuple[Any, ...]:
    """What computes for an attention layer: mostly one; none of a layer that computes by itself."""
    impl = getattr(layer, "impl", None)
    return () if impl is None else tuple({id(one): one for one in (impl, *impl.get_impl_variants())}.values())


def _tensors_of(layer: Any) -> Iterator[torch.Tensor]:
    """Parameters and buffers of an attention layer, and what computes for it holds."""
    yield from layer.parameters()
    yield from layer.buffers()
    for impl in _impls_of(layer):
        yield from (value for value in vars(impl).values() if isinstance(value, torch.Tensor))


class _CopyRecorder(TorchDispatchMode):
    """Notes every address that something of another address is copied to."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].data_ptr() != args[1].data_ptr():
            self.written.add(args[0].data_ptr())
        return func(*args, **(kwargs or {}))
