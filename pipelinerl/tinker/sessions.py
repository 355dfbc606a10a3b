"""Clients, the models they train, the samplers they hold, and what they have saved. No clock, no socket.

A saved model is known by its path, `tinker://<model>/weights/<name>` or `.../sampler_weights/<name>`, and is a folder of the server's: so
it outlives the session, and the server.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import shutil
from pathlib import Path

from pipelinerl.tinker.backend import Refusal, Weights
from pipelinerl.tinker.provenance import Facts

KEPT_SNAPSHOTS = 4
"""Snapshots without a name, the newest of each model, that are kept: a loop samples from the newest, an asynchronous one from a few. More
take a model's room on the disk each."""
SCHEME = "tinker://"
TRAINING, SAMPLING = "weights", "sampler_weights"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PATH = re.compile(
    r"tinker://(?P<model>[A-Za-z0-9:_-]{1,200})/(?P<kind>weights|sampler_weights)/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,127})"
)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class TrainedModel:
    """A model of a client."""

    model_id: str
    session_id: str
    num_steps: int = 0
    """Optimizer steps asked for."""
    facts: Facts = dataclasses.field(default_factory=Facts)
    """Of the tokens it was trained on since the last of them."""
    num_saved: int = 0
    """Snapshots that were given a name here."""
    num_removed: int = 0
    """Those of them that were removed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """What a client samples from."""

    sampler_id: str
    session_id: str
    weights: Weights
    model_path: str | None = None
    """The saved model it was made of, if it was."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """A client."""

    session_id: str
    heard_at: float
    """On the server's clock, seconds."""
    is_finished: bool = False


class Sessions:
    """Everything that clients have made."""

    def __init__(self, folder: Path) -> None:
        """`folder` is where models are saved."""
        self.models: dict[str, TrainedModel] = {}
        self.samplers: dict[str, Sampler] = {}
        self._sessions: dict[str, Session] = {}
        self._folder = folder
        self._steps: dict[str, int] = {}
        """Optimizer steps behind a saved model, by its path, of those saved since the server started."""

    def begin(self, *, now_s: float) -> str:
        """Begin a session; return its id."""
        session_id = f"session-{secrets.token_hex(6)}"  # never used again: what it saves outlives the server
        self._sessions[session_id] = Session(session_id=session_id, heard_at=now_s)
        return session_id

    def heard(self, session_id: str, *, now_s: float) -> Session:
        """Return a session that says something. Raises `KeyError` for one that is not known, or has ended."""
        session = self._sessions[session_id]
        if session.is_finished:
            raise KeyError(session_id)
        session.heard_at = now_s
        return session

    def silent(self, *, since_s: float) -> list[str]:
        """Return the sessions that were heard last before this moment, and have not ended."""
        return [one.session_id for one in self._sessions.values() if not one.is_finished and one.heard_at < since_s]

    def finish(self, session_id: str) -> list[str]:
        """End a session; return its models, which are forgotten. One that is not known, or has ended, has none."""
        if (session := self._sessions.get(session_id)) is not None:
            session.is_finished = True
        gone = [model.model_id for model in self.models.values() if model.session_id == session_id]
        for model_id in gone:
            self.remove_snapshots(self.models.pop(model_id), keep=0)
        self.samplers = {name: one for name, one in self.samplers.items() if one.session_id != session_id}
        return gone

    def forget_models(self) -> list[str]:
        """Forget every model, as the trainer has; return them."""
        gone = list(self.models)
        self.models.clear()
        return gone

    def model(self, model_id: str) -> TrainedModel:
        """Return a model. Raises `Refusal`."""
        if (model := self.models.get(model_id)) is None:
            words = f"model {model_id}: there is none of this name; it was unloaded, its session ended, or the trainer was lost"
            raise Refusal(f"{words}. Begin one, from what was saved of it (create_training_client_from_state) or anew", is_asker_wrong=True)
        return model

    def add_sampler(self, session_id: str, number: int, weights: Weights, *, model_path: str | None = None) -> str:
        """Keep a sampler; return its id, which is the same for the same number."""
        sampler_id = f"{session_id}:sample:{number}"
        self.samplers.setdefault(sampler_id, Sampler(sampler_id=sampler_id, session_id=session_id, weights=weights, model_path=model_path))
        return sampler_id

    # --- what is saved ---

    def new_path(self, model: TrainedModel, name: str | None, *, kind: str) -> str:
        """Return the path of a model that is being saved, under the client's name for it or one of ours. Raises `Refusal`."""
        if name is None:
            model.num_saved += 1
            name = _unnamed(model.num_saved)
        if not _NAME.fullmatch(name):
            raise Refusal(f"{name!r} is no name of a checkpoint: letters, digits and . _ - up to 128", is_asker_wrong=True)
        return f"{SCHEME}{model.model_id}/{kind}/{name}"

    def was_saved(self, path: str, *, num_steps: int) -> None:
        """Note that a model was saved as it was after so many optimizer steps."""
        self._steps[path] = num_steps

    def folder_of(self, path: str) -> Path:
        """Return the folder of a saved model, there or not. Raises `Refusal`."""
        if (found := _PATH.fullmatch(path)) is None:
            raise Refusal(f"{path!r} is no path of a saved model: tinker://<model>/weights/<name>", is_asker_wrong=True)
        return self._folder / found["model"].replace(":", "_") / found["kind"] / found["name"]

    def weights_of(self, path: str) -> Weights:
        """Return what a sampler of a saved model samples from. Raises `Refusal` where there is none."""
        folder = self.folder_of(path)
        if not folder.is_dir() and path not in self._steps:
            raise Refusal(f"{path}: no saved model of this path", is_asker_wrong=True)
        model_id = path.removeprefix(SCHEME).partition("/")[0]
        return Weights(model_id=model_id, folder=str(folder), num_steps=self._steps.get(path, 0))

    def remove_snapshots(self, model: TrainedModel, *, keep: int = KEPT_SNAPSHOTS) -> None:
        """Remove a model's snapshots without a name, but for the newest."""
        for number in range(model.num_removed + 1, model.num_saved - keep + 1):
            shutil.rmtree(self.folder_of(f"{SCHEME}{model.model_id}/{SAMPLING}/{_unnamed(number)}"), ignore_errors=True)
            model.num_removed = number

    def saved(self, model_id: str) -> list[str]:
        """Return the paths of what was saved of a model."""
        found = []
        for kind in (TRAINING, SAMPLING):
            folder = self._folder / model_id.replace(":", "_") / kind
            names = sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []
            found += [f"{SCHEME}{model_id}/{kind}/{name}" for name in names]
        return found


def _unnamed(number: int) -> str:
    return f"unnamed-{number:06d}"
