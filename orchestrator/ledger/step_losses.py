"""The loss of each step of a script, and the demonstrations of its supervised steps, kept as long as the steps may be trained again."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import numpy as np

from orchestrator.ledger.store import PRUNING, Store, writing
from pipelinerl.messages import Demonstration

_KEY = "loss "
"""The prefix of the state's keys; the step's number follows."""
_STATE = writing("state")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """What a step is trained by, beside its rows."""

    name: str = ""
    """See `pipelinerl.messages.MicroBatch.loss`."""
    demonstrations: tuple[Demonstration, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the demonstrations with a loss."""
        return sum(one.num_trained for one in self.demonstrations)

    @property
    def record(self) -> str | None:
        """What the history says of it, as JSON; None of a step with the run's own loss."""
        if not self.name:
            return None
        digest = hashlib.blake2b(digest_size=8)
        for one in self.demonstrations:
            digest.update(np.array([one.num_prompt, one.num_tokens], np.int32).tobytes() + one.token_ids.tobytes())
        supervised = {"num_demonstrations": len(self.demonstrations), "digest": digest.hexdigest()} if self.demonstrations else {}
        return json.dumps({"loss": self.name} | supervised)


OWN_LOSS = StepLoss()


class StepLosses:
    """The losses of the steps whose rows are kept, by step."""

    def __init__(self, store: Store) -> None:
        self._store = store
        rows = store.rows("state", "key >= ? AND key < ?", _KEY, _KEY[:-1] + chr(ord(_KEY[-1]) + 1))
        self._of_steps = {int(key.removeprefix(_KEY)): _read(value) for key, value in rows}

    def of(self, step: int) -> StepLoss:
        """Return the loss of a step."""
        return self._of_steps.get(step, OWN_LOSS)

    def say(self, step: int, loss: StepLoss) -> None:
        """Note the loss of a step, before any of it leaves; part of the transaction under way."""
        if loss.name:
            self._of_steps[step] = loss
            rows = [[one.num_prompt, one.token_ids.tolist()] for one in loss.demonstrations]
            self._store.put(_STATE, f"{_KEY}{step}", json.dumps([loss.name, rows]))

    def forget(self, before: int) -> None:
        """Forget the steps before one: no trainer starts from there any more."""
        for step in [step for step in self._of_steps if step < before]:
            del self._of_steps[step]
            self._store.put(f"{PRUNING}state WHERE key = ?", f"{_KEY}{step}")


def _read(value: str) -> StepLoss:
    name, rows = json.loads(value)
    found = (Demonstration(token_ids=np.array(token_ids, np.int32), num_prompt=num_prompt) for num_prompt, token_ids in rows)
    return StepLoss(name=name, demonstrations=tuple(found))
