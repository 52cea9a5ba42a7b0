"""Causal LMs from and to Hugging Face folders: safetensors only, no code from the model ever runs."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def load_causal_lm(
    source: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> PreTrainedModel:
    """A causal LM in evaluation mode (no dropout) from a folder or a Hub id.

    `attention` is transformers' `attn_implementation`.
    Raises FileNotFoundError, naming the source and the mend, when there is no such model.
    """
    with _naming(source), _quiet():
        model = AutoModelForCausalLM.from_pretrained(
            locate(source), dtype=dtype, attn_implementation=attention, use_safetensors=True
        )
    return model.to(device).eval()  # pyright: ignore[reportArgumentType]


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a Hub id. Raises FileNotFoundError as `load_causal_lm` does."""
    with _naming(source):
        return AutoTokenizer.from_pretrained(locate(source))


def save_causal_lm(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | str | Path, directory: str | Path
) -> Path:
    """Write model and tokenizer so that `AutoModelForCausalLM.from_pretrained(directory)` loads them.

    `tokenizer` may be the folder to copy the tokenizer's files from, unchanged. Tied weights are written once.
    Raises FileNotFoundError when that folder holds no tokenizer.
    """
    directory = Path(directory)
    with _quiet():
        model.save_pretrained(directory)
    if not isinstance(tokenizer, str | Path):
        tokenizer.save_pretrained(directory)
        return directory
    files = [path for name in TOKENIZER_FILES if (path := Path(tokenizer) / name).is_file()]
    if not files:
        raise FileNotFoundError(f"no tokenizer files in {tokenizer}: pass the folder the model was loaded from")
    for file in files:
        if file.parent.resolve() != directory.resolve():
            shutil.copy2(file, directory)
    return directory


def named_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's tensors by their Hugging Face names, detached but not copied: they change as training goes on.

    A tensor known under two names (a head tied to the embedding) appears once, under the first.
    """
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor.detach()
    return weights


def locate(source: str | Path) -> str:
    """The folder as transformers wants it; a Hub id as it is. A path that leads nowhere never reaches the Hub.

    Raises FileNotFoundError.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", "tokenizer.json", "tokenizer_config.json")):
            raise FileNotFoundError(f"{path} holds neither config.json nor a tokenizer: give the folder that does")
        return str(path)
    if isinstance(source, Path) or source.startswith(("/", ".", "~")) or source.count("/") != 1:
        raise FileNotFoundError(
            f"no model folder at {source}: give a folder with config.json and *.safetensors, or a Hub id like org/name"
        )
    return source


@contextmanager
def _naming(source: str | Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileNotFoundError(
            f"cannot load {source}: it needs config.json, tokenizer.json and *.safetensors; for a Hub id, check its "
            f"spelling and the network, or download it first (`hf download {source}`). Cause: {error}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars, which tear a live terminal view."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
