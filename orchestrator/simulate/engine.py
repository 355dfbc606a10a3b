"""An engine with continuous batching, computed from event to event, never token by token.

A pass samples one token for each running sequence and computes prompts, `pass_tokens` in all. It lasts

    f(n) + kv_token_s * C + prefill_token_s * P

for n sequences with C tokens in their caches and P tokens of prompts. With speculative decoding and few sequences, d drafted tokens of
each are verified in f(n (1 + d)), and m tokens of each come of it: here that is m passes of one token, each of an m-th of the time.

While nothing begins or ends, C grows by n with each pass, so k passes last k (f(n) + kv_token_s C) + kv_token_s n k (k - 1) / 2: the end
of a stretch is known at its start, and how many passes are over at any moment follows from a square root. Stretches end only between two
passes. What arrives within one waits for its end, as in the live loop (`pipelinerl.engine.loop`); there too a version changes between two
passes, beside whatever runs.

A full KV cache makes the youngest sequence give way, whose cache is computed again later, as vLLM does.

Where the trainer shares its device, an engine sleeps from the end of a pass until it commits a policy; it keeps its sequences.
"""

from __future__ import annotations

import bisect
import collections
import heapq
from collections.abc import Callable

from orchestrator.simulate.cores import Cores
from orchestrator.simulate.kv_cache import KvCache
from orchestrator.simulate.sequence import Sequence, Stretch, interpolate
from orchestrator.simulate.staging import Committed, Staging
from orchestrator.simulate.world import EngineWorld, SyncWorld
from pipelinerl.messages import Finish


class SimulatedEngine:
    """One engine process. `submit`, `cancel`, `begin_staging` and `staged` are what it is told."""

    def __init__(
        self, world: EngineWorld, sync: SyncWorld, *, engine_id: int, max_running: int, cores: Cores, keeps_kv: bool = False
    ) -> None:
        """`keeps_kv`: it sleeps with its KV cache, which it drops otherwise."""
        self.engine_id = engine_id
        self.version = 0
        self.is_alive = True
        self.slots, self.room = max_running, world.kv_tokens
        self.on_committed: Callable[[SimulatedEngine, Committed], None] = lambda engine, committed: None
        self.on_busy: Callable[[SimulatedEngine, float, float], None] = lambda engine, start, end: None
        """Called with each stretch of passes."""
        self.on_asleep: Callable[[SimulatedEngine, float], None] = lambda engine, sleep_s: None
        """Called once it sleeps, with the seconds that took."""
        self.num_tokens = self.num_steps = self.num_context_tokens = self.num_evicted = self.num_prefilled = 0
        self.busy_s = self.idle_s = 0.0
        self._world, self._cores, self._events = world, cores, cores.events
        self._swap_s, self._sleep_s, self._keeps_kv = sync.pause_s, sync.sleep_s, keeps_kv
        self.drafts: tuple[int, int] = (0, 0)
        """Below so many sequences, so many tokens of each are drafted."""
        self._cache = KvCache(num_tokens=world.kv_tokens, has_prefix_cache=world.has_prefix_cache, block_tokens=world.block_tokens)
        self._pass = 0
        """Passes that are over."""
        self._writing: dict[Sequence, None] = {}
        """Sequences that write, oldest first."""
        self._computing: dict[Sequence, None] = {}
        """Sequences with room in the cache that are computed before they write."""
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._ahead: list[tuple[int, int, int, Sequence, int]] = []
        """Heap of (pass, order, serial, sequence, mark); a mark of -1 is its end."""
        self._order = 0
        self._context = 0
        """Tokens that passes read in caches, less `_pass` for each sequence that writes."""
        self._commits: list[tuple[int, int]] = [(0, 0)]
        """(pass, version) of each commit."""
        self._cancelled: list[Sequence] = []
        self._staging: Staging | None = None
        self._stretch: Stretch | None = None
        self._is_held_up = False
        """True while it pauses for a swap, or is about to begin."""
        self._idle_since = cores.events.now_s
        self._is_asleep = self._is_told_to_sleep = False

    # --- what it is told ---

    def submit(self, sequence: Sequence) -> None:
        """Take a request: it begins between two passes, as soon as there is room."""
        sequence.num_pending = max(1, sequence.num_context - self._cache.whole(sequence.num_cached))
        self._waiting.append(sequence)
        if len(self._waiting) == 1 and self.num_running < self.slots:
            self._interrupt()

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence between two passes; it is answered with what it has written."""
        self._cancelled.append(sequence)
        self._interrupt()

    def begin_staging(self, *, version: int, when_idle: bool, kv_max_staleness: int | None) -> Staging:
        """Note that a policy is on its way; the caller says `staged` once it is here."""
        self._staging = Staging(version=version, when_idle=when_idle, kv_max_staleness=kv_max_staleness, began_s=self._events.now_s)
        return self._staging

    def staged(self, staging: Staging) -> float:
        """Note that a policy is here: it is committed before the next pass. Return the seconds that it took."""
        staging.stage_s = self._events.now_s - staging.began_s
        self._interrupt()
        return staging.stage_s

    def sleep(self) -> None:
        """Give the device away after the pass and the swap under way; a commit wakes it."""
        self._is_told_to_sleep = True
        self._interrupt()

    def die(self) -> None:
        """End, with all it has."""
        self.is_alive = False
        if self._stretch is not None:
            self._stretch.job.cancel()
            self._advance(self._num_over())
        self._rest(is_idle=False)

    def written_of(self, sequence: Sequence) -> int:
        """Return the tokens that a sequence has written by now."""
        return sequence.written + (self._pass + self._num_over() - sequence.since if sequence.since >= 0 else 0)

    # --- gauges ---

    @property
    def num_running(self) -> int:
        return len(self._writing) + len(self._computing)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_used(self) -> float | None:
        """Part of the KV cache that is held; None where it is not bounded."""
        return self._cache.used(self._pass + self._num_over()) / self._world.kv_tokens if self._cache.is_bounded else None

    def gauges(self) -> dict[str, float | int | None]:
        """Return the fields of `messages.EngineLoad`."""
        over, now_s = self._num_over(), self._events.now_s
        return {
            "engine_id": self.engine_id,
            "version": self.version,
            "num_running": self.num_running,
            "num_waiting": len(self._waiting),
            "num_tokens": self.num_tokens + over * len(self._writing),
            "num_steps": self.num_steps + over,
            "busy_s": self.busy_s + (now_s - self._stretch.began_s if self._stretch else 0.0),
            "idle_s": self.idle_s + (now_s - self._idle_since if self._idle_since >= 0 else 0.0),
            "kv_used": self.kv_used,
            "num_context_tokens": self.num_context_tokens + self._read_by(over),
            "num_drafted": 0,  # drafts are in the time of passes alone
            "num_accepted": 0,
        }

    # --- between two passes ---

    def _interrupt(self) -> None:
        """Have the stretch under way end with the pass under way; where none is, begin one with all that arrives at this moment."""
        stretch = self._stretch
        if stretch is not None:
            over = self._num_over()
            if over + 1 < stretch.num_passes:
                stretch.num_passes = over + 1
                stretch.job.resize(stretch.seconds(over + 1))
        elif not self._is_held_up:
            self._is_held_up = True
            self._events.after(0.0, self._plan)

    def _num_over(self) -> int:
        """Passes of the stretch under way that are over."""
        return 0 if self._stretch is None else self._stretch.num_over()

    def _read_by(self, num_passes: int) -> int:
        """Return the tokens that the first passes of a stretch read in caches; each sequence has one more in every pass."""
        num = len(self._writing)
        return num_passes * (self._context + num * self._pass) + num * num_passes * (num_passes - 1) // 2

    def _end_stretch(self) -> None:
        assert self._stretch is not None
        self._is_held_up = True
        self._advance(self._stretch.num_passes)
        self._plan()

    def _advance(self, num_passes: int) -> None:
        stretch, self._stretch = self._stretch, None
        assert stretch is not None
        self.busy_s += self._events.now_s - stretch.began_s
        self.on_busy(self, stretch.began_s, self._events.now_s)
        self.num_context_tokens += self._read_by(num_passes)
        self._pass += num_passes
        self.num_steps += num_passes
        self.num_tokens += num_passes * len(self._writing)

    def _plan(self) -> None:
        """Between two passes: answer, swap, begin, and go on to the next event."""
        if not self.is_alive:
            return
        self._reach()
        for sequence in self._cancelled:
            if not sequence.is_over:
                self._leave(sequence)
                self._answer(sequence, Finish.CANCELLED)
        self._cancelled.clear()
        staging = self._staging
        is_empty = self._is_asleep or not (self._writing or self._computing or self._waiting)
        if staging is not None and staging.stage_s is not None and (is_empty or not staging.when_idle):
            self._staging = None
            self._rest(is_idle=False)
            self._events.after(self._swap_s, lambda: self._commit(staging))
        elif staging is None and self._is_told_to_sleep:
            self._is_told_to_sleep = False
            self._rest(is_idle=True)
            self._events.after(self._sleep_s, self._fall_asleep)
        else:
            self._is_held_up = False
            self._begin_passes()

    def _fall_asleep(self) -> None:
        if not self.is_alive:
            return
        self._is_asleep = True
        self.on_asleep(self, self._sleep_s)
        self._plan()

    def _reach(self) -> None:
        """Answer what has ended, and tell of marks."""
        ahead = self._ahead
        while ahead and ahead[0][0] <= self._pass:
            _, _, serial, sequence, mark = heapq.heappop(ahead)
            if serial != sequence.serial or sequence.is_over:
                continue
            if mark >= 0:
                sequence.reached(sequence, mark)
            else:
                self._leave(sequence)
                self._answer(sequence, sequence.finish)

    def _answer(self, sequence: Sequence, finish: Finish) -> None:
        sequence.is_over, sequence.finish = True, finish
        if self._world.answer_s:
            self._events.after(self._world.answer_s, lambda: sequence.answer(sequence))
        else:
            sequence.answer(sequence)

    def _commit(self, staging: Staging) -> None:
        if not self.is_alive:
            return
        self.version = staging.version
        self._commits.append((self._pass, staging.version))
        is_dropped, self._is_asleep = self._is_asleep and not self._keeps_kv, False
        num_recomputed = self._drop() if is_dropped else self._recompute(staging.version, limit=staging.kv_max_staleness)
        assert staging.stage_s is not None
        committed = Committed(
            version=staging.version,
            pause_s=self._swap_s,
            stage_s=staging.stage_s,
            num_running=self.num_running + len(self._waiting),
            num_recomputed_tokens=num_recomputed,
        )
        self.on_committed(self, committed)
        self._plan()

    def _recompute(self, version: int, *, limit: int | None) -> int:
        """Have caches that are too old computed anew; return their tokens."""
        stale = [] if limit is None else [one for one in self._writing if version - one.kv_version > limit]
        for sequence in stale:
            self._stop_writing(sequence)
            sequence.num_pending, sequence.kv_version = sequence.num_tokens, version
            self._computing[sequence] = None
        return sum(sequence.num_pending for sequence in stale)

    def _drop(self) -> int:
        """Have all caches computed anew, which were dropped for its sleep; return their tokens."""
        held = [*self._writing, *self._computing]
        for sequence in reversed(held):
            self._give_way(sequence)
        return sum(sequence.num_pending for sequence in held)

    # --- passes ---

    def _begin_passes(self) -> None:
        if self._is_asleep:
            self._rest(is_idle=True)
            return
        self._make_room()
        num_computed = self._compute()
        num = len(self._writing)
        if not num and not num_computed:
            self._rest(is_idle=True)
            return
        self._rest(is_idle=False)
        self.num_prefilled += num_computed
        below, num_drafted = self.drafts
        is_tail = self._world.tokens_per_pass > 1 and num + len(self._computing) + len(self._waiting) < below
        num_verified, tokens = (num * (1 + num_drafted), self._world.tokens_per_pass) if is_tail else (num, 1.0)
        stretch = Stretch(
            first_s=(interpolate(self._world.pass_s, num_verified) + self._world.kv_token_s * (self._context + num * self._pass)) / tokens,
            more_s=self._world.kv_token_s * num / tokens,
            prefill_s=self._world.prefill_token_s * num_computed,
            began_s=self._events.now_s,
        )
        stretch.num_passes = 1 if num_computed else self._passes_ahead()
        stretch.job = self._cores.start("engine", stretch.seconds(stretch.num_passes), self._end_stretch)
        self._stretch = stretch

    def _passes_ahead(self) -> int:
        """Passes until the next sequence ends or is told of, or the cache is full."""
        ahead = self._ahead
        while ahead[0][2] != ahead[0][3].serial or ahead[0][3].is_over:
            heapq.heappop(ahead)
        most = ahead[0][0] - self._pass
        return max(1, min(most, self._cache.passes_left(self._pass)) if self._cache.is_bounded else most)

    def _make_room(self) -> None:
        """Have the youngest sequences give way where the next token of all does not fit; the last one always goes on."""
        while len(self._writing) > 1 and self._cache.overflows(self._pass):
            self._give_way(next(reversed(self._writing)))
            self.num_evicted += 1

    def _give_way(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.num_pending = sequence.num_tokens
        self._waiting.appendleft(sequence)

    def _compute(self) -> int:
        """Compute prompts, as many as a pass takes; return their tokens. What is then whole writes in this very pass."""
        budget = self._world.pass_tokens - len(self._writing)
        num_computed = 0
        while budget > 0 and (sequence := self._next_to_compute()) is not None:
            num = min(budget, sequence.num_pending)
            sequence.num_pending -= num
            num_computed += num
            budget -= num
            if sequence.num_pending:
                break
            del self._computing[sequence]
            self._write(sequence)
        return num_computed

    def _next_to_compute(self) -> Sequence | None:
        if self._computing:
            return next(iter(self._computing))
        if not self._waiting or self.num_running >= self.slots:
            return None
        if self.num_running and not self._cache.fits(self._waiting[0], self._pass):
            return None
        sequence = self._waiting.popleft()
        self._cache.take(sequence, version=self.version)
        self._computing[sequence] = None
        return sequence

    def _write(self, sequence: Sequence) -> None:
        """Have it write from this pass on."""
        sequence.since = self._pass
        self._writing[sequence] = None
        self._context += sequence.num_tokens - self._pass
        self._cache.grows(self._pass)
        for mark in (*(mark for mark in sequence.marks if mark > sequence.written), -1):
            at = self._pass + (sequence.length if mark < 0 else mark) - sequence.written
            self._order += 1
            heapq.heappush(self._ahead, (at, self._order, sequence.serial, sequence, mark))

    def _stop_writing(self, sequence: Sequence) -> None:
        """Note what it has written, and have it write no more for now."""
        del self._writing[sequence]
        self._context -= sequence.num_tokens - sequence.since
        self._cache.stops(self._pass)
        sequence.runs += self._runs(sequence.since, self._pass)
        sequence.written += self._pass - sequence.since
        sequence.since = -1
        sequence.serial += 1

    def _leave(self, sequence: Sequence) -> None:
        """Take it out of wherever it is."""
        if sequence in self._writing:
            self._stop_writing(sequence)
        self._computing.pop(sequence, None)
        if sequence.is_held:
            self._cache.give(sequence)
        else:
            self._waiting.remove(sequence)

    def _runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return (version, passes) of the passes from `start` to `end`."""
        commits, runs = self._commits, []
        at = bisect.bisect_right(commits, start, key=lambda commit: commit[0]) - 1
        while start < end:
            until = min(end, commits[at + 1][0]) if at + 1 < len(commits) else end
            if until > start:
                runs.append((commits[at][1], until - start))
            start, at = until, at + 1
        return runs

    def _rest(self, *, is_idle: bool) -> None:
        if is_idle and self._idle_since < 0:
            self._idle_since = self._events.now_s
        elif not is_idle and self._idle_since >= 0:
            self.idle_s += self._events.now_s - self._idle_since
            self._idle_since = -1.0
