"""Clients, the models they train, the samplers they hold, and what they have saved. No clock, no socket.

All of it stands in the ledger, too, and so outlives a server. A saved model is known by its path, `tinker://<model>/weights/<name>` or
`.../sampler_weights/<name>`, and is a folder of the server's: so it outlives the session.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import shutil
from pathlib import Path

from pipelinerl.tinker.backend import Refusal, Weights
from pipelinerl.tinker.ledger import Ledger
from pipelinerl.tinker.provenance import Facts

KEPT_SNAPSHOTS = 4
"""Snapshots without a name, the newest of each model, that are kept: a loop samples from the newest, an asynchronous one from a few. More
take a model's room on the disk each."""
SCHEME = "tinker://"
TRAINING, SAMPLING = "weights", "sampler_weights"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODEL = re.compile(r"[A-Za-z0-9:_-]{1,200}")
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


class Sessions:
    """Everything that clients have made, here and in the ledger."""

    def __init__(self, folder: Path, *, ledger: Ledger, now_s: float) -> None:
        """`folder` is where models are saved. What the ledger holds of an earlier server goes on, as if heard from just now."""
        self._folder, self._ledger = folder, ledger
        self._sessions = {session_id: Session(session_id=session_id, heard_at=now_s) for session_id in ledger.sessions()}
        self.models: dict[str, TrainedModel] = {}
        for model_id, session_id, num_steps, passes in ledger.models():
            model = self.models[model_id] = TrainedModel(model_id=model_id, session_id=session_id, num_steps=num_steps)
            for about in passes:
                model.facts.add(Facts.of(about.get("facts", {})))
        self.samplers: dict[str, Sampler] = {}
        for sampler_id, session_id, model_id, weights_folder, num_steps, path in ledger.samplers():
            weights = Weights(model_id=model_id, folder=weights_folder, num_steps=num_steps)
            self.samplers[sampler_id] = Sampler(sampler_id=sampler_id, session_id=session_id, weights=weights, model_path=path)
        self._steps = ledger.saved()
        """Optimizer steps behind a saved model, by its path, of those saved by a server of this run."""

    def begin(self, *, now_s: float) -> str:
        """Begin a session; return its id."""
        session_id = f"session-{secrets.token_hex(6)}"  # never used again: what it saves outlives the server
        self._ledger.begin_session(session_id)
        self._sessions[session_id] = Session(session_id=session_id, heard_at=now_s)
        return session_id

    def heard(self, session_id: str, *, now_s: float) -> Session:
        """Return a session that says something. Raises `KeyError` for one that is not known, or has ended."""
        session = self._sessions[session_id]
        session.heard_at = now_s
        return session

    def silent(self, *, since_s: float) -> list[str]:
        """Return the sessions that were heard last before this moment."""
        return [one.session_id for one in self._sessions.values() if one.heard_at < since_s]

    def finish(self, session_id: str) -> list[str]:
        """End a session; return its models, which are forgotten here. One that is not known, or has ended, has none."""
        self._sessions.pop(session_id, None)
        gone = [model.model_id for model in self.models.values() if model.session_id == session_id]
        for model_id in gone:
            del self.models[model_id]
            self.remove_snapshots(model_id, keep=0)
            self._ledger.close_model(model_id)
        self._ledger.end_session(session_id)
        self.samplers = {name: one for name, one in self.samplers.items() if one.session_id != session_id}
        return gone

    def add_model(self, model_id: str, *, session_id: str) -> TrainedModel:
        """Begin a model."""
        model = self.models[model_id] = TrainedModel(model_id=model_id, session_id=session_id)
        self._ledger.open_model(model_id, session_id=session_id)
        return model

    def model(self, model_id: str) -> TrainedModel:
        """Return a model. Raises `Refusal`."""
        if (model := self.models.get(model_id)) is None:
            words = f"model {model_id}: there is none of this name; it was unloaded, or its session ended"
            raise Refusal(f"{words}. Begin one, from what was saved of it (create_training_client_from_state) or anew", is_asker_wrong=True)
        return model

    def add_sampler(self, session_id: str, number: int, weights: Weights, *, model_path: str | None = None) -> str:
        """Keep a sampler; return its id, which is the same for the same number."""
        sampler_id = f"{session_id}:sample:{number}"
        self.samplers.setdefault(sampler_id, Sampler(sampler_id=sampler_id, session_id=session_id, weights=weights, model_path=model_path))
        self._ledger.add_sampler(sampler_id, session_id, weights.model_id, weights.folder, weights.num_steps, model_path)
        return sampler_id

    # --- what is saved ---

    def new_path(self, model: TrainedModel, name: str | None, *, kind: str, seq_id: int) -> str:
        """Return the path of a model that is being saved, under the client's name for it or one of ours. Raises `Refusal`."""
        name = f"unnamed-{seq_id:09d}" if name is None else name
        if not _NAME.fullmatch(name):
            raise Refusal(f"{name!r} is no name of a checkpoint: letters, digits and . _ - up to 128", is_asker_wrong=True)
        return f"{SCHEME}{model.model_id}/{kind}/{name}"

    def was_saved(self, path: str, *, num_steps: int) -> None:
        """Note that a model was saved as it was after so many optimizer steps."""
        self._ledger.was_saved(path, num_steps=num_steps)
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

    def remove_snapshots(self, model_id: str, *, keep: int = KEPT_SNAPSHOTS) -> None:
        """Remove a model's snapshots without a name, but for the newest."""
        folder = self._folder / model_id.replace(":", "_") / SAMPLING
        found = sorted(folder.glob("unnamed-*")) if folder.is_dir() else []
        for path in found[: max(0, len(found) - keep)]:
            shutil.rmtree(path, ignore_errors=True)

    def saved(self, model_id: str) -> list[str]:
        """Return the paths of what was saved of a model."""
        found = []
        if not _MODEL.fullmatch(model_id):
            return found
        for kind in (TRAINING, SAMPLING):
            folder = self._folder / model_id.replace(":", "_") / kind
            names = sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []
            found += [f"{SCHEME}{model_id}/{kind}/{name}" for name in names]
        return found
