"""The models of several clients over one set of tensors in use: each is brought in when it is asked for, and put by for another.

What is brought in is what a checkpoint holds, the weights that take the updates and the optimizer's moments, and beside it the gradient
collected since the model's last step. Of adapters that is megabytes; of whole weights it is four times the model, on the host, for every
model but the one in use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pipelinerl.errors import CheckpointDamaged, DataError
from pipelinerl.messages import SaveModel
from pipelinerl.storage import checksum
from pipelinerl.storage.checkpoint_folder import sync
from trainer.build import Trained, state_of
from trainer.model.lora import adapted, draw_adapters

ABOUT = "about.json"
"""In a saved model's folder: what it is, and the checksum of each file. Written last."""
_FORM = 1
"""Number of the form of a saved model; raised where an older program could not read it."""
_Tensors = dict[str, dict[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PutBy:
    """A model that is not in use, on the host."""

    tensors: _Tensors
    gradient: torch.Tensor


class Models:
    """All models, of which one is in use, or none yet. Every method but `close` may take as long as a copy of a model."""

    def __init__(self, trained: Trained, *, base: Path) -> None:
        """`base` names what adapters are over."""
        self._trained = trained
        self._base = base
        self._fresh = self._copy()
        self._put_by: dict[str, _PutBy] = {}
        self._current: str | None = None

    def __contains__(self, model_id: str) -> bool:
        return model_id == self._current or model_id in self._put_by

    def open(self, model_id: str, *, seed: int | None) -> None:
        """Begin a model and bring it in; `seed` draws an adapter of its own. A model that there is begins anew."""
        self._put_current_by()
        self._bring_in(self._fresh)
        if seed is not None:
            draw_adapters(self._trained.model.module, seed=seed)
            self._trained.optimizer.take_weights()
        self._put_by.pop(model_id, None)
        self._current = model_id

    def use(self, model_id: str) -> None:
        """Bring a model in. Raises `DataError` for one that there is not."""
        if model_id == self._current:
            return
        if model_id not in self._put_by:
            raise DataError(f"model {model_id}: there is none of this name, or it was unloaded")
        self._put_current_by()
        self._bring_in(self._put_by.pop(model_id))
        self._current = model_id

    def close(self, model_id: str) -> None:
        """Forget a model; one that there is not is ignored."""
        self._put_by.pop(model_id, None)
        if model_id == self._current:
            self._current = None

    def forget(self) -> None:
        """Forget all models."""
        self._put_by.clear()
        self._current = None

    @contextlib.contextmanager
    def showing(self, folder: Path | None) -> Iterator[None]:
        """Have the weights in use be those of a saved model for a while, or, of None, those that all models begin with."""
        weights = self._fresh.tensors["model"] if folder is None else self._read(folder, has_optimizer=False)["model"]
        aside = {name: tensor.clone() for name, tensor in self._in_use()["model"].items()}
        try:
            self._write(weights, part="model")
            yield
        finally:
            self._write(aside, part="model")

    def save(self, request: SaveModel) -> None:
        """Write a model to a folder, which takes its name once all of it is on the disk. Raises `DataError` where that is taken.

        What the same request has written before stays as it is.
        """
        folder = Path(request.folder)
        if folder.exists() and request.save_id and _about(folder).get("save_id") == request.save_id:
            return
        if folder.exists() and not request.may_replace:
            raise DataError(f"{folder.name}: this model has a checkpoint of that name. Choose another, or allow it to be overwritten")
        self.use(request.model_id)
        parts = self._in_use()
        if not request.has_optimizer:
            del parts["optimizer"]
        if request.has_gradient and bool(self._trained.optimizer.gradient.any()):
            parts["gradient"] = {"gradient": self._trained.optimizer.gradient}
        draft = folder.with_name(f".{folder.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True, mode=0o700)
        files = {}
        for part, tensors in parts.items():
            path = draft / f"{part}.safetensors"
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            files[path.name] = checksum.of_file(path)
        about = {"form": _FORM, "base": str(self._base), "is_adapter": self._is_adapter, "files": files, "save_id": request.save_id}
        with open(draft / ABOUT, "x") as file:
            json.dump(about, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if folder.exists():
            old = folder.with_name(f".{folder.name}.old")
            shutil.rmtree(old, ignore_errors=True)  # of a trainer that was killed here
            folder.rename(old)
            draft.rename(folder)
            shutil.rmtree(old)
        else:
            draft.rename(folder)
        sync(folder.parent)

    def load(self, model_id: str, folder: Path, *, has_optimizer: bool) -> None:
        """Give a model what a folder holds; without the optimizer its moments begin anew. The gradient that it has collected is dropped, or
        is that of the folder, where it holds one."""
        state = self._read(folder, has_optimizer=has_optimizer)
        self.open(model_id, seed=None)
        gradient = state.pop("gradient", {})
        for part, tensors in state.items():
            self._write(tensors, part=part)
        for tensor in gradient.values():
            self._trained.optimizer.gradient.copy_(tensor)

    @property
    def _is_adapter(self) -> bool:
        return bool(adapted(self._trained.model.module))

    def _in_use(self) -> _Tensors:
        return state_of(self._trained)

    def _copy(self) -> _PutBy:
        return _PutBy(
            tensors={part: {name: _on_host(tensor) for name, tensor in tensors.items()} for part, tensors in self._in_use().items()},
            gradient=_on_host(self._trained.optimizer.gradient),
        )

    def _put_current_by(self) -> None:
        if self._current is not None:
            self._put_by[self._current] = self._copy()
            self._current = None

    def _bring_in(self, state: _PutBy) -> None:
        for part, tensors in state.tensors.items():
            self._write(tensors, part=part)
        self._trained.optimizer.gradient.copy_(state.gradient)

    def _write(self, tensors: Mapping[str, torch.Tensor], *, part: str) -> None:
        with torch.no_grad():
            for name, tensor in self._in_use()[part].items():
                tensor.copy_(tensors[name])
        self._trained.optimizer.round()

    def _read(self, folder: Path, *, has_optimizer: bool) -> _Tensors:
        """Read and verify what a folder holds. Raises `DataError` for what does not fit, `CheckpointDamaged` for what is not as written."""
        about = _about(folder)
        if not about:
            raise DataError(f"{folder.name}: no saved model of this name")
        parts = ("model", "optimizer") if has_optimizer else ("model",)
        if has_optimizer and "gradient.safetensors" in about["files"]:
            parts = (*parts, "gradient")
        if about.get("form") != _FORM or about.get("is_adapter") != self._is_adapter:
            holds = "an adapter" if about.get("is_adapter") else "whole weights"
            raise DataError(
                f"{folder.name} holds {holds} in form {about.get('form')}, and this server trains the other kind, or form {_FORM}"
            )
        found: _Tensors = {}
        for part in parts:
            path = folder / f"{part}.safetensors"
            if path.name not in about["files"]:
                raise DataError(f"{folder.name} was saved to be sampled from: it holds no optimizer. Load the weights alone")
            if checksum.of_file(path) != about["files"][path.name]:
                raise CheckpointDamaged(f"{path}: its checksum is not the one it was written with")
            try:
                found[part] = load_file(path)
            except (OSError, SafetensorError) as error:
                raise CheckpointDamaged(f"{path}: {error}") from error
        for part, tensors in found.items():
            own = {"gradient": self._trained.optimizer.gradient} if part == "gradient" else self._in_use()[part]
            expected = {name: tensor.shape for name, tensor in own.items()}
            if {name: tensor.shape for name, tensor in tensors.items()} != expected:
                raise DataError(f"{folder.name} was saved of another model, or of adapters of another rank than lora.rank is here")
        return found


def _about(folder: Path) -> dict[str, Any]:
    """What a folder says of itself; nothing where it holds no saved model."""
    try:
        return json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError):
        return {}


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
