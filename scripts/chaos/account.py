"""Holds what liars said against what the orchestrator refused, lie by lie; and whether forged log-probabilities were seen and named.

Every lie must have been refused as what it is. Three things may have become of it in its stead:

    fenced    it answers an attempt that was given up, or answered, before it came: nobody listens to those
    died      it never came, and between what came before and after it of that process another orchestrator, or another process of that
              name, took its place, or the run ended; a bare frame dies with its connection, too
    again     it was said once more, to an orchestrator that took another's place, and is counted twice

And nothing true may have been refused. The run's own counters must say the same of its last life.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from pipelinerl.algorithms.mismatch import MIN_TOKENS
from pipelinerl.observe.lines import read_journals
from scripts.chaos.liar import PLAUSIBLE, TRUTH, forger_id
from scripts.chaos.witness import FENCED, TAKEN

MAX_SHOWN = 20
_NAMED = re.compile(r"^step (\d+): engine (\d+)'s log-probabilities differ", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class _Said:
    process: int
    digest: str
    kind: str
    name: str
    is_frame: bool
    is_answer: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Heard:
    orchestrator: int
    peer: str
    connection: str
    digest: str
    what: str
    outcome: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class Account:
    """The number of lies by role and kind, and what became of them."""

    counts: dict[tuple[str, str], collections.Counter[str]]
    """`sent`, `refused`, `fenced`, `died`."""
    names: set[tuple[str, str]]
    """(role, name) of every lie that was refused at least once."""
    num_forged: int
    """Answers with forged log-probabilities."""
    num_named: int
    """Steps in which the forger was named."""
    problems: list[str]

    def words(self) -> str:
        """A table for a person, and what was not as it should be."""
        lines = [f"{'lies, by who told them and kind':<34} {'sent':>7} {'refused':>8} {'fenced':>7} {'died':>6}"]
        for (role, kind), count in sorted(self.counts.items()):
            lines.append(f"{f'{role}: {kind}':<34} {count['sent']:>7} {count['refused']:>8} {count['fenced']:>7} {count['died']:>6}")
        total = sum(self.counts.values(), collections.Counter())
        lines.append(f"{'all':<34} {total['sent']:>7} {total['refused']:>8} {total['fenced']:>7} {total['died']:>6}")
        lines.append(f"{self.num_forged} answers with plausible forged log-probabilities; their engine was named in {self.num_named} steps")
        shown = [f"BROKEN: {problem}" for problem in self.problems[:MAX_SHOWN]]
        lines += [*shown, f"{len(self.problems)} lies or truths were not taken for what they are"] if shown else []
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        counts = {f"{role}: {kind}": dict(count) for (role, kind), count in sorted(self.counts.items())}
        return {"counts": counts, "forged": self.num_forged, "named": self.num_named, "problems": len(self.problems)}


def account_of(run_folder: Path, *, is_wire_faulty: bool) -> Account:
    """Compare both sides. `is_wire_faulty`: connections were harmed on purpose."""
    heard = [_Heard(*fields, outcome=tuple(outcome)) for *fields, outcome in _lines(run_folder / "heard.log")]
    account = Account(counts=collections.defaultdict(collections.Counter), names=set(), num_forged=0, num_named=0, problems=[])
    lies: set[str] = set()
    for path in sorted((run_folder / "lies").glob("*.log")):
        said = [_Said(*fields) for fields in _lines(path)]
        lies |= {one.digest for one in said if one.kind not in (TRUTH, PLAUSIBLE)}
        account.num_forged += sum(one.kind == PLAUSIBLE for one in said)
        _compare(account, path.stem, said, [one for one in heard if one.peer == path.stem], is_wire_faulty=is_wire_faulty)
    for one in heard:
        if one.digest not in lies and one.outcome not in ((TAKEN,), (FENCED,)):
            account.problems.append(f"{one.peer}'s {one.what} is true, and was refused: {', '.join(one.outcome)}")
    _compare_with_own_count(account, run_folder, heard)
    _see_forger(account, run_folder, heard)
    return account


def is_forger_named(run_folder: Path) -> bool:
    """Return whether a step has named the engine that forges."""
    return any(forger_id() in engine_ids for engine_ids in _named(run_folder).values())


def _named(run_folder: Path) -> dict[int, set[int]]:
    """Return the numbers of the engines that each step has named."""
    named: dict[int, set[int]] = collections.defaultdict(set)
    for step, engine_id in _NAMED.findall((run_folder / "logs" / "orchestrator.log").read_text(errors="replace")):
        named[int(step)].add(int(engine_id))
    return named


def _lines(path: Path) -> Iterator[list]:
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("["):
            yield json.loads(line)


def _compare(account: Account, peer: str, said: list[_Said], heard: list[_Heard], *, is_wire_faulty: bool) -> None:
    by_digest: dict[str, list[_Heard]] = collections.defaultdict(list)
    for one in heard:
        by_digest[one.digest].append(one)
    times = collections.Counter(one.digest for one in said)
    came: list[_Heard | None] = []
    """What came of each; of what was said several times the last ones."""
    is_mark = [times[one.digest] == 1 for one in said]
    """Whether it can be told which of what was said came: gauges of a peer at rest are the same, time and again."""
    for one in said:
        times[one.digest] -= 1
        left = by_digest[one.digest]
        came.append(left.pop(0) if len(left) > times[one.digest] else None)
    marks = [of_it if is_known else None for of_it, is_known in zip(came, is_mark, strict=True)]
    for place, (one, of_it) in enumerate(zip(said, came, strict=True)):
        if one.kind in (TRUTH, PLAUSIBLE):
            continue
        count = account.counts[peer.partition("-")[0], one.kind]
        count["sent"] += 1
        if of_it is None:
            died = (one.is_frame and is_wire_faulty) or _died(place, said, marks, is_frame=one.is_frame)
            count["died" if died else "lost"] += 1
            if not died:
                account.problems.append(f"{peer}'s lie '{one.name}' never came, although both ends lived")
        elif one.kind in of_it.outcome:
            count["refused"] += 1
            account.names.add((peer.partition("-")[0], one.name))
        elif one.is_answer and of_it.outcome == (FENCED,):
            count["fenced"] += 1
        else:
            expected, got = f"expected refused: {one.kind}", ", ".join(of_it.outcome)
            account.problems.append(f"{peer}'s lie '{one.name}' ({of_it.what}): {expected}, got {got}")


def _died(place: int, said: list[_Said], marks: list[_Heard | None], *, is_frame: bool) -> bool:
    """Return whether one of the two ends was another process before and after what was said at a place."""

    def is_like(one: _Said) -> bool:
        """Of the same process; and bare frames overtake messages that come again."""
        return one.process == said[place].process and one.is_frame <= is_frame

    before = next((marks[at] for at in range(place - 1, -1, -1) if marks[at] and is_like(said[at])), None)
    after = next((marks[at] for at in range(place + 1, len(said)) if marks[at] and is_like(said[at])), None)
    if before is None or after is None:
        return True
    return before.orchestrator != after.orchestrator or (is_frame and before.connection != after.connection)


def _compare_with_own_count(account: Account, run_folder: Path, heard: list[_Heard]) -> None:
    """The last life of the run must have counted what it refused."""
    lines = [line for line in read_journals(run_folder) if line["process"] == "orchestrator"]
    status = next((line for line in reversed(lines) if line["kind"] == "status"), None)
    if status is None or not heard or lines[-1]["kind"] != "end":  # it did not live to say
        return
    refused = collections.Counter(kind for one in heard if one.orchestrator == heard[-1].orchestrator for kind in one.outcome)
    for kind, count in refused.items():
        if kind not in (TAKEN, FENCED) and status["refused"].get(kind, 0) != count:
            account.problems.append(f"the last life refused {count} for {kind}, its own count says {status['refused'].get(kind, 0)}")


def _see_forger(account: Account, run_folder: Path, heard: list[_Heard]) -> None:
    """Every step whose end an orchestrator has heard must have named the forger, where it had enough of its tokens and of others'."""
    if not account.num_forged:
        return
    named, forger = _named(run_folder), forger_id()
    account.num_named = sum(forger in engine_ids for engine_ids in named.values())
    for step, engine_ids in sorted(named.items()):
        if engine_ids - {forger}:
            account.problems.append(f"step {step}: engines {sorted(engine_ids - {forger})} were named, which forge no log-probabilities")
    told = {int(one.what.split()[1]) for one in heard if one.what.startswith("StepDone ") and one.outcome == (TAKEN,)}
    for step, tokens in _trained_tokens(run_folder).items():
        is_to_be_named = tokens[f"engine-{forger}"] >= MIN_TOKENS and len(+tokens) > 1
        if step in told and is_to_be_named and forger not in named[step]:
            account.problems.append(f"step {step} trained {tokens[f'engine-{forger}']} forged log-probabilities, and nobody was named")


def _trained_tokens(run_folder: Path) -> dict[int, collections.Counter[str]]:
    """Return the tokens of each engine by step, from the ledger's own events."""
    made_by: dict[str, str] = {}
    trained: dict[str, tuple[int, str, int]] = {}
    query = "SELECT kind, rollout_id, step, peer, num_tokens FROM events WHERE kind IN ('generated', 'trained') ORDER BY seq"
    with closing(sqlite3.connect(f"file:{run_folder / 'ledger.sqlite'}?mode=ro", uri=True)) as database:
        for kind, rollout_id, step, peer, num_tokens in database.execute(query):
            if kind == "generated":
                made_by[rollout_id] = peer
            else:
                trained[rollout_id] = (step, made_by[rollout_id], num_tokens)
    found: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for step, peer, num_tokens in trained.values():
        found[step][peer] += num_tokens
    return found
