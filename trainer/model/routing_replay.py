"""Routing replay for mixtures of experts: every token goes to the experts the engine sent it to, weighted by the gates of today.

Near a tie, engine and trainer pick different experts for the same token, because their arithmetic differs in the last bits; the token's
log-probability then differs by much more. With the engine's choice recorded the two compute the same, and the gates still learn: only the
indices come from the record, the probabilities are the router's own (arXiv:2510.11370, R3). Tokens without a record are routed as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from pipelinerl.errors import ConfigError

_READ = ("top_k", "norm_topk_prob", "num_experts", "weight")
"""The attributes of a router whose rule is the one written here: softmax over all experts, the best `top_k`, scaled to 1 where wanted."""


class RoutingReplay:
    """The routers of a model, and the record that the layer under way is computed by.

    A layer is given its row's record with every call, and hands it to its router just before: so a layer that is computed again in the
    backward pass, when other rows have gone through it in the meantime, has the same.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        """Put the record before every router's own choice. Raises `ConfigError` for a model whose routers follow another rule."""
        self.routes: torch.Tensor | None = None
        """[I, layers, k] of the row under way, -1 where nothing is recorded; None where nothing is for the whole row."""
        base: Any = module.base_model
        for layer in base.layers:
            layer.register_forward_pre_hook(self._take_routes, with_kwargs=True)
        routers = [part for part in module.modules() if type(part).__name__.endswith("TopKRouter")]
        for part in routers:
            if not all(hasattr(part, name) for name in _READ):
                raise ConfigError(f"model.replay_routing: {type(part).__name__} chooses experts by a rule not known here. Set it to false")
        if not routers:
            raise ConfigError(f"model.replay_routing: {type(module).__name__} is no mixture of experts. Set it to false")
        for layer, router in enumerate(routers):
            router.forward = self._replayed(router, router.forward, layer=layer)

    def _take_routes(self, _layer: torch.nn.Module, _given: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.routes = options.get("routes")

    def _replayed(self, router: Any, native: Callable[..., Any], *, layer: int) -> Callable[..., Any]:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, scores, chosen = native(hidden)
            if self.routes is None:
                return logits, scores, chosen
            recorded = self.routes[:, layer].to(chosen.dtype)
            chosen = torch.where(recorded[:, :1] >= 0, recorded, chosen)
            scores = logits.float().softmax(-1).gather(-1, chosen)
            if router.norm_topk_prob:
                scores = scores / scores.sum(-1, keepdim=True)
            return logits, scores.to(logits.dtype), chosen

        return forward
