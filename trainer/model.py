"""The model being trained: loaded from a Hugging Face folder, run on packed rows, named as Hugging Face names it.

Log-probabilities come out as the engine defines them, so that the two can be compared token by token: logits divided by the sampling
temperature, softmax in float32 over the whole vocabulary, natural logarithm. Logits exist only for the tokens that predict a trained one.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from pipelinerl.errors import ConfigError
from trainer import attention
from trainer.row import Row


class Model:
    """A causal language model that computes log-probabilities of packed rows."""

    def __init__(self, folder: Path, *, dtype: str, temperature: float, device: torch.device) -> None:
        """Load the weights. Raises `ConfigError` where the folder cannot be loaded or the dtype cannot be trained in."""
        if dtype == "float16":
            raise ConfigError("model.dtype float16 cannot be trained: sums of gradients leave its range; use bfloat16 or float32")
        self.module = _load(folder, dtype=getattr(torch, dtype))
        self.module.to(device)  # pyright: ignore[reportArgumentType]  # transformers annotates it as a function of anything
        self.device = device
        self.temperature = temperature
        # No dropout and no router noise: the log-probabilities must be those of the engine. Gradients flow all the same.
        self.module.eval()

    def logprobs(self, row: Row, *, with_entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([K] float32 log-probability of every trained token, with gradient; [K] float32 entropy in nats).

        The gradient of the entropy costs memory for one more table of logits, so it is kept only where asked for.
        """
        output = self.module(
            input_ids=row.token_ids[None],
            position_ids=row.positions[None],
            use_cache=False,
            logits_to_keep=row.sources,
            blocks=row.blocks,
        )
        logprobs = (output.logits[0].float() / self.temperature).log_softmax(-1)
        with torch.set_grad_enabled(with_entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, row.targets[:, None])[:, 0], entropy

    def parameters(self) -> list[torch.nn.Parameter]:
        """Every parameter once, tied ones too."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The present weights by Hugging Face name, tied ones under each of their names. Mostly the weights themselves, not copies."""
        return dict(revert_weight_conversion(self.module, {name: tensor.detach() for name, tensor in self.module.state_dict().items()}))

    def tied_names(self) -> frozenset[str]:
        """Names that are another name for a parameter already named: a published policy may leave them out."""
        named = {parameter.data_ptr() for _, parameter in self.module.named_parameters()}
        owners = {name for name, _ in self.module.named_parameters()}
        return frozenset(name for name, tensor in self.tensors().items() if name not in owners and tensor.data_ptr() in named)


def _load(folder: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path {folder} is not a Hugging Face model folder: it has no config.json (looked from {Path.cwd()})")
    transformers.logging.disable_progress_bar()  # one line in a log for every shard of every model tells nobody anything
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True)
    except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
        raise ConfigError(f"model.path {folder} cannot be loaded as a causal language model: {type(error).__name__}: {error}") from error
