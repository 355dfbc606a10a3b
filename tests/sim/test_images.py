"""Runs whose prompts show images: who is killed, what is stored, what travels, what is replayed; on simulated time.

A simulated engine samples by the images, too, so a rollout of another image than its prompt's is found by its tokens.
"""

from __future__ import annotations

import collections
import contextlib
import re
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from orchestrator.advantages import MethodAdvantages
from orchestrator.replay.__main__ import replay
from orchestrator.replay.prompts import replay_prompts
from orchestrator.replay.recorded import RecordedPrompt
from pipelinerl.algorithms.methods import method_of
from pipelinerl.messages import Generate, Images, Prompt
from tests.sim import peers
from tests.sim.chaos import Faults, survive
from tests.sim.memory import MemoryLink, NetworkFaults
from tests.sim.peers import World
from tests.sim.run import Cast, Prompts, config, run

SIZE = 5000


class Pictures(Prompts):
    """The prompts of one row in four have no image; the others have one of their own, and some another that they share."""

    def next(self) -> Prompt:
        row = self.position[1]
        return msgspec.structs.replace(super().next(), images=images_of(row))


def images_of(row: int) -> Images:
    own, shared = (np.random.default_rng(number).bytes(SIZE) for number in (row, 1 << 20))
    return ((), (own,), (shared, own), (own,))[row % 4]


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({"engine_s": 2.0}, id="engine"),
        pytest.param({"scorer_s": 1.0}, id="scorer"),
        pytest.param({"trainer_s": 2.0}, id="trainer"),
        pytest.param({"orchestrator_s": 3.0}, id="orchestrator"),
        pytest.param({"engine_s": 4.0, "scorer_s": 4.0, "trainer_s": 5.0, "orchestrator_s": 6.0}, id="everything"),
    ],
)
def test_a_run_with_images_goes_on_whoever_is_killed_and_every_rollout_saw_its_own(tmp_path: Path, faults: dict[str, Any]) -> None:
    network = NetworkFaults(delay_s=0.02, jitter_s=0.1, drop_fraction=0.02, seed=1)
    settings, world = config(trainer={"steps": 12}), World(token_s=1e-3, bad_score_fraction=0.05)
    faulty = Faults(seed=1, until_s=30.0, **faults)
    survived = survive(settings, folder=tmp_path, faults=faulty, world=world, network=network, prompts=Pictures)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert survived.checker.num_done == 12
    assert len(survived.kills) == len(faults), survived.kills
    assert {int(row[2].partition(":")[2]) % 4 for row in survived.rows if row[3] == "trained"} == {0, 1, 2, 3}


class Overheard:
    """An engine's link that counts the bytes of the images that come."""

    def __init__(self, link: MemoryLink, counts: collections.Counter[bytes]) -> None:
        self._link = link
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def receive(self, timeout_s: float) -> Any:
        return self._look(self._link.receive(timeout_s))

    async def wait(self) -> Any:
        return self._look(await self._link.wait())

    def _look(self, message: Any) -> Any:
        if isinstance(message, Generate):
            self._counts.update(image for image in message.images if image)
        return message


def test_an_image_travels_to_an_engine_once_and_is_stored_once_for_each_group(tmp_path: Path) -> None:
    arrived: dict[int, collections.Counter[bytes]] = collections.defaultdict(collections.Counter)

    async def engine(link: MemoryLink, *, engine_id: int, max_running: int, world: World) -> None:
        overheard: Any = Overheard(link, arrived[engine_id])
        await peers.engine(overheard, engine_id=engine_id, max_running=max_running, world=world)

    settings = config(trainer={"steps": 6}, rollout={"group_size": 8}, run={"record_groups": 1000})
    found = run(settings, folder=tmp_path, source=Pictures(0), cast=Cast(engine=engine), is_recorded=True)
    assert found.problems() == []
    assert found.record.mislabelled == []
    for counts in arrived.values():
        assert set(counts.values()) == {1}, "each once, of a group and of several that share it"
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as ledger:
        prompts = [body for (body,) in ledger.execute("SELECT prompt FROM groups")]
        bodies = b"".join(body for (body,) in ledger.execute("SELECT scored FROM trajectories"))
        num_groups = ledger.execute("SELECT count(*) FROM drawn").fetchone()[0]
    own = [images_of(row)[-1] for row in range(num_groups) if images_of(row)]
    assert sum(sum(counts.values()) * SIZE for counts in arrived.values()) == (len(own) + len(arrived)) * SIZE
    assert all(sum(image in body for body in prompts) == 1 for image in own)
    num_images = sum(len(images_of(row)) for row in range(num_groups))
    assert sum(map(len, prompts)) < num_images * SIZE + 200 * num_groups
    assert not any(image in bodies for image in own), "siblings have none of their own"


def test_the_recorded_stages_of_a_run_with_images_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(trainer={"steps": 6}, run={"record_groups": 1000})
    rule = MethodAdvantages(method_of(settings), settings.reward)
    assert run(settings, folder=tmp_path, source=Pictures(0), group_advantages=rule, is_recorded=True).problems() == []
    replay(tmp_path, stages=["generation", "batching", "training", "weight_sync"], overrides=[])
    said = capsys.readouterr().out
    assert "0 of another, 0 not asked for" in said
    assert "0 end otherwise, 0 with other advantages" in said
    assert re.search(r"training: steps 0 to 5, \d+ rows to 1 replicas; 0 differ", said)
    assert "0 engines differ" in said


def test_a_replay_of_prompts_names_an_image_that_is_another_now() -> None:
    class Source:
        """One prompt, of one image."""

        position = (0, 0)

        def __init__(self, image: bytes) -> None:
            self._prompt = Prompt(prompt_id="0:0", text="?", token_ids=np.zeros(1, np.int32), images=(image,))

        def next(self) -> Prompt:
            self.position = (0, 1)
            return self._prompt

    drawn = [RecordedPrompt(group_id=0, prompt_id="0:0", position=(0, 1), prompt=Source(b"cat").next())]
    same: Any = Source(b"cat")
    other: Any = Source(b"dog")
    assert replay_prompts(same, drawn).differences == []
    assert replay_prompts(other, drawn).differences == ["prompt 0:0: image 0 is another"]
