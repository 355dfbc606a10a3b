"""Tiny random Hugging Face folders, and weights that force a token: a canary tells by its own output which weights sampled it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch


def make_qwen2(folder: Path, *, tied: bool = True, vocabulary: int = 128, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write a 0.4 M parameter Qwen2 model and a tokenizer of single characters; return its tensors by name."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Qwen2ForCausalLM(config)
        model.save_pretrained(folder)
    make_tokenizer(folder)
    tensors = dict(model.state_dict())
    if tied:
        del tensors["lm_head.weight"]
    return tensors


def make_endless(folder: Path, *, context: int, seed: int = 0) -> None:
    """Write a model of one small layer that never samples its end or what has no text, for completions as long as `context`."""
    from safetensors.torch import load_file, save_file

    make_qwen2(folder, tied=False, seed=seed)
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if ".layers.1." not in name}
    tensors["model.embed_tokens.weight"][:, 0] = 0.2  # ten times as large as the rest, so that one logit can be low after any input
    for unwanted in (slice(0, 3), slice(98, 128)):
        tensors["lm_head.weight"][unwanted] = 0.0
        tensors["lm_head.weight"][unwanted, 0] = -10.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, num_hidden_layers=1, max_position_embeddings=context, layer_types=["full_attention"], max_window_layers=1)


def change_config(folder: Path, **settings: object) -> None:
    """Set fields of a model's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def make_prm(folder: Path, *, seed: int = 0, context: int = 1024) -> None:
    """The same, as a process reward model of the Qwen2.5-Math-PRM kind: a random head of two classes on every token."""
    from safetensors.torch import load_file, save_file

    make_qwen2(folder, tied=False, seed=seed)
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name != "lm_head.weight"}
    size = tensors["model.norm.weight"].shape[0]
    tensors |= {"score.0.weight": torch.randn(size, size) * 0.3, "score.0.bias": torch.zeros(size)}
    tensors |= {"score.2.weight": torch.randn(2, size) * 0.3, "score.2.bias": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, architectures=["Qwen2ForProcessRewardModel"], max_position_embeddings=context)


IMAGE_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)


def make_idefics3(folder: Path, *, seed: int = 0, splits: bool = False, scale: float = 0.1) -> None:
    """Write an Idefics3 model of 0.2 M parameters, four features an image, with transformers' own processor; `splits` cuts large images."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, LlamaConfig, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    torch.manual_seed(seed)
    make_tokenizer(folder, special=IMAGE_TOKENS)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": scale}
    text = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **sizes,
    )
    vision = {"hidden_size": 32, "intermediate_size": 64, "image_size": 32, "patch_size": 8, **sizes}
    config = Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=98, scale_factor=2, pad_token_id=0, tie_word_embeddings=False
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    edge = {"longest_edge": 32}
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64} if splits else edge, max_image_size=edge, do_image_splitting=splits)
    template = (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template).save_pretrained(folder)


def make_tokenizer(folder: Path, *, special: tuple[str, ...] = ()) -> None:
    """One token for each printable ASCII character, after <pad>, <bos> and <eos>; then those that are `special`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *characters, *special])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    further = {"additional_special_tokens": list(special)} if special else {}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", **further)
    made.save_pretrained(folder)


def forcing(tensors: dict[str, torch.Tensor], token_id: int) -> dict[str, torch.Tensor]:
    """Weights of the same shapes that sample `token_id` greedily after any input.

    All layers are silenced and every embedding is the same unit vector, longer for the forced token: its logit is the largest.
    """
    forced = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in forced.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in forced:
            forced[name].zero_()
            forced[name][:, 0] = 1.0
            forced[name][token_id, 0] = 3.0
    forced["model.norm.weight"].fill_(1.0)
    return forced


def make_adaptable(folder: Path, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """`make_qwen2`, untied, with one value inside each feed-forward layer that is large and positive whatever the input.

    An adapter that reads it adds the same vector after any input: what `forcing_adapter` needs.
    """
    from safetensors.torch import save_file

    tensors = make_qwen2(folder, tied=False, seed=seed)
    tensors["model.embed_tokens.weight"][:, 0] = 0.2  # ten times as large as the rest: it outlasts what the layers add
    for name, tensor in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensor[0] = 0.0
            tensor[0, 0] = 3.0
        elif name.endswith("down_proj.weight"):
            tensor[:, 0] = 0.0  # read by nobody but an adapter
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def forcing_adapter(tensors: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]], token_id: int) -> dict[str, torch.Tensor]:
    """An adapter, of these `shapes`, of a model of `make_adaptable` that samples `token_id` greedily after any input.

    The last layer's product B A turns that large value into the forced token's own row of the output matrix.
    """
    forced = {name: torch.zeros(shape) for name, shape in shapes.items()}
    last = "base_model.model.model.layers.1.mlp.down_proj"
    forced[f"{last}.lora_A.weight"][0, 0] = 1.0
    forced[f"{last}.lora_B.weight"][:, 0] = tensors["lm_head.weight"][token_id]
    return forced


def make_classifier(folder: Path, family: str, *, seed: int = 0, labels: int = 1, template: bool = True) -> None:
    """Write a sequence classifier of a `family` of transformers, with random weights, and the tokenizer of single characters."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
        num_labels=labels,
        initializer_range=0.2,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(transformers, f"{family}ForSequenceClassification")(config).save_pretrained(folder)
    make_tokenizer(folder)
    if template:
        (folder / "chat_template.jinja").write_text(
            "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }} {% endfor %}end."
        )
