"""Which weight transport a run has: chosen when its trainer starts, by the engines that are there then, and kept for those that join."""

from __future__ import annotations

import dataclasses

from orchestrator.peers.engines import Engines
from orchestrator.rules.weight_transport import choose_transport, why_not_ranks, why_unreached
from pipelinerl.config import Config
from pipelinerl.config.file import with_tensor_parallel
from pipelinerl.config.scaling import elastic_sizes, why_width_fixed
from pipelinerl.config.sharded_policies import sharded_policies_can_be_sent
from pipelinerl.errors import ConfigError
from pipelinerl.messages import EngineReady, LayoutFixed, TrainerReady
from pipelinerl.observe.journal import Journal


@dataclasses.dataclass(slots=True, kw_only=True)
class TransportChoice:
    """The choice, once a trainer has started."""

    config: Config
    journal: Journal
    _transport: str | None = dataclasses.field(default=None, init=False)
    _trainer: str = dataclasses.field(default="", init=False)
    """The trainer's machine."""
    _num_ranks: dict[int, int | str] = dataclasses.field(default_factory=dict, init=False)
    """Ranks of an engine of each `tensor_parallel_size` that was asked about; or why there can be none."""

    def layout_for(self, trainer: TrainerReady, engines: Engines) -> LayoutFixed:
        """Return what a trainer that starts must know to publish: the layout that the engines want, and the transport to them."""
        weights = self.config.weights
        transports = frozenset(trainer.transports).intersection(*(engine.ready.transports for engine in engines))
        if weights.transport == "auto" and any(why_not_ranks(one, self._most_ranks) for one in transports):
            transports = frozenset()  # engines that the rule of elastic roles may order would take none of them
        self._transport, reason = choose_transport(
            weights.transport,
            trainer=trainer.machine,
            engines={engine.peer: engine.ready.machine for engine in engines},
            address=weights.address,
            device_transports=transports,
            is_colocated=self.config.is_colocated,
            could_be_sharded=self._could_be_sharded,
        )
        self._trainer = trainer.machine
        self.journal.write("choice", text=reason)
        print(reason, flush=True)
        shards = engines.shards() if weights.transport == "sharded" or self.config.is_colocated else ()
        return LayoutFixed(
            tensors=engines.layout(),
            num_engines=self.config.engine.most,
            transport=self._transport,
            shards=shards,
            num_apart=self.config.engine.apart,
        )

    @property
    def _most_ranks(self) -> int:
        """Ranks of the widest engine that the run may come to have by itself."""
        config = self.config
        return max(elastic_sizes(config.engine, config.pipeline)) * config.engine.num_stages if config.pipeline.elastic else 1

    @property
    def _could_be_sharded(self) -> bool:
        sharded = self.config.weights.model_copy(update={"transport": "sharded"})
        return next(sharded_policies_can_be_sent(sharded, self.config.trainer, self.config.engine), None) is None

    def why_unreached(self, ready: EngineReady) -> str | None:
        """Say why no policy would reach an engine that joins a run under way; None where they do, or nothing was chosen yet."""
        return None if self._transport is None else why_unreached(ready, self._transport, trainer=self._trainer)

    def why_not_width(self, size: int) -> str | None:
        """Say why engines of another `tensor_parallel_size` could not serve this run; None where they could."""
        if (why := why_width_fixed(self.config.engine, self.config.pipeline, size)) is not None:
            return why
        if size not in self._num_ranks:
            try:
                self._num_ranks[size] = with_tensor_parallel(self.config, size).engine.num_ranks
            except ConfigError as error:
                self._num_ranks[size] = str(error)
        found = self._num_ranks[size]
        if isinstance(found, str):
            return found
        return None if self._transport is None else why_not_ranks(self._transport, found)
