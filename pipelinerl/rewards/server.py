"""The scorer's main loop: a link to the orchestrator on one side, pools of reward workers on the other."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

from pipelinerl.config import Config
from pipelinerl.errors import PeerGone
from pipelinerl.messages import CancelRequest, EndEpisode, Failed, Message, Request, ScorerLoad, ScorerReady, Stop
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.pool.pools import RewardPools
from pipelinerl.runtime.membership import ScaleFolder
from pipelinerl.transport.base import Link

LOAD_EVERY_S = 1.0
"""Seconds between two `ScorerLoad`. They are the sign of life, so this must stay far below `scorer.silent_after_s`."""


class Server:
    """One scorer.

    takes       `Request`, `CancelRequest`, `EndEpisode`, `Stop` from the orchestrator; answers of workers
    gives       `ScorerReady` once, `Result` for every request that is not cancelled, `FunctionFailed` for each
                cause of failures, `ScorerLoad` every second
    waits for   the link and every worker's channel at once, until the next deadline at the latest
    woken by    messages, ends of workers, deadlines
    fails       `ConfigError` where a function or the tokenizer cannot be loaded, `PeerGone` where the fork server is gone; a
                reward function that fails is an outcome
    ends        on `Stop`: calls under way are killed, requests without an answer are dropped
    """

    def __init__(
        self, config: Config, *, link: Link, journal: Journal, scorer_id: int, gpus: Sequence[str] = (), scale: ScaleFolder | None = None
    ) -> None:
        """Take the UUIDs of the `gpus` that reward models were dealt, in the order of `launch.gpus`, and `scale`, where the run says how
        many processes these have.
        """
        self._link = link
        self._journal = journal
        self._scorer_id = scorer_id
        self._num_scored = 0
        self._is_stopped = False
        self._next_load_at = time.monotonic()
        self._pools = RewardPools(config, journal=journal, name=f"scorer-{scorer_id}", gpus=gpus, scale=scale)

    def run(self) -> None:
        """Serve until `Stop`. An error is reported to the orchestrator before it ends this process, except `PeerGone`, the loss of the fork
        server: this process is then started again, and its open requests are sent again.
        """
        try:
            self._pools.start()
            self._pools.wake_on(self._link.fileno())
            self._link.introduce(self._introduce)
            while not self._is_stopped:
                self._turn()
        except PeerGone:
            raise
        except Exception as error:  # the peer is told what ends this process; the error is then raised as it is
            self._link.send(Failed(error=f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._pools.close()

    def _introduce(self, kept: Sequence[bytes]) -> list[Message]:
        """Drop all requests and introduce this scorer: a new orchestrator asks again for what it wants, and requests of the dead one must
        not be answered.
        """
        self._pools.cancel_all()
        return [ScorerReady(scorer_id=self._scorer_id, process_id=os.getpid(), num_slots=self._pools.num_slots)]

    def _turn(self) -> None:
        # The link is drained last, with nothing sent between that and the wait: ZeroMQ signals its descriptor once for each change
        # of state, and sending uses such a signal up.
        scored = list(self._pools.advance())
        self._link.send(*scored, *self._pools.news())
        self._num_scored += len(scored)
        if time.monotonic() >= self._next_load_at:
            self._next_load_at = time.monotonic() + LOAD_EVERY_S
            self._pools.follow()
            self._report()
        elif self._pools.has_process_news:
            self._report()
        has_news = False
        while not self._is_stopped and (message := self._link.receive(0)) is not None:
            has_news = True
            self._on_message(message)
        if not self._is_stopped:
            self._pools.wait(0.0 if has_news else self._next_load_at - time.monotonic())

    def _on_message(self, message: Message) -> None:
        match message:
            case Request():
                self._pools.submit(message)
            case CancelRequest():
                self._pools.cancel(message.request_id)
            case EndEpisode():
                self._pools.end_episode(message.rollout_id)
            case Stop():
                self._is_stopped = True

    def _report(self) -> None:
        load = ScorerLoad(
            scorer_id=self._scorer_id,
            num_running=self._pools.num_running,
            num_scored=self._num_scored,
            busy_s=self._pools.total_busy_s(),
            functions=self._pools.functions(),
            models=self._pools.models(),
        )
        self._journal.write("load", **{name: msgspec.to_builtins(getattr(load, name)) for name in load.__struct_fields__})
        self._link.send(load)
