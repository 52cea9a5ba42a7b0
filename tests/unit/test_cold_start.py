"""The cold start on a toy task, and its cache."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from headway.models import cold_start as module
from headway.models.cold_start import ColdStart, ColdStartFailed, cached_cold_start, cold_start, exact_match
from headway.models.loading import load_causal_lm, named_weights
from headway.models.tiny import TINY_SIZES, character_tokenizer, tiny_model
from headway.training.routing import Layout

SETTINGS = ColdStart(size="0.4m", seed=0, accuracy=0.5, batch_size=10, max_steps=100)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    return tmp_path


def repeat_the_digit() -> module.Examples:
    tokenizer = character_tokenizer()
    eos = tokenizer.eos_token_id
    pairs = [(tokenizer.encode(f"{digit}="), [*tokenizer.encode(str(digit)), eos]) for digit in range(10)]
    return [(np.array(prompt, np.int32), np.array(answer, np.int32)) for prompt, answer in pairs]


def test_training_stops_at_the_accuracy_and_repeats_exactly() -> None:
    examples = repeat_the_digit()
    first, second = tiny_model(), tiny_model()
    facts = cold_start(first, SETTINGS, examples, examples)
    assert facts == cold_start(second, SETTINGS, examples, examples)
    assert 0.5 <= facts["reached"] <= 1 and facts["steps"] < 100
    weights = named_weights(second)
    assert all(tensor.equal(weights[name]) for name, tensor in named_weights(first).items())


def test_a_mixture_of_experts_is_cold_started_too_and_loads_as_one() -> None:
    examples = repeat_the_digit()
    made = cached_cold_start(replace(SETTINGS, size="moe"), examples, examples)
    facts, model = json.loads((made / "cold_start.json").read_text()), load_causal_lm(made)
    assert facts["size"] == "moe" and facts["reached"] >= SETTINGS.accuracy
    assert exact_match(model, *module._lay_out(examples)) == pytest.approx(facts["reached"])
    assert Layout.of(model).num_experts == TINY_SIZES["moe"]["num_experts"]


def test_exact_match_is_the_share_of_answers_that_greedy_decoding_gets_right() -> None:
    examples, model = repeat_the_digit(), tiny_model()
    cold_start(model, SETTINGS, examples, examples)
    generate: Any = model.generate  # pyright: ignore[reportAttributeAccessIssue]
    right = 0
    for prompt, answer in examples:
        tokens = torch.from_numpy(prompt).long().unsqueeze(0)
        out = generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2, do_sample=False)
        right += out[0, len(prompt) :].tolist() == answer.tolist()
    assert exact_match(model, *module._lay_out(examples)) == pytest.approx(right / len(examples))


def test_an_accuracy_out_of_reach_says_so() -> None:
    examples = repeat_the_digit()
    with pytest.raises(ColdStartFailed, match="in 2 steps"):
        cold_start(tiny_model(), replace(SETTINGS, accuracy=0.99, max_steps=2), examples, examples)


def test_the_cache_is_keyed_by_settings_and_examples_and_records_what_was_reached(own_cache: Path) -> None:
    examples = repeat_the_digit()
    made = cached_cold_start(SETTINGS, examples, examples)
    facts = json.loads((made / "cold_start.json").read_text())
    assert facts["reached"] >= SETTINGS.accuracy == facts["accuracy"]
    assert exact_match(load_causal_lm(made), *module._lay_out(examples)) == pytest.approx(facts["reached"])
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert cached_cold_start(SETTINGS, examples, examples) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    assert cached_cold_start(replace(SETTINGS, seed=1), examples, examples) != made
    assert cached_cold_start(SETTINGS, examples[:9], examples) != made


def test_a_death_while_saving_leaves_nothing_that_looks_finished(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = repeat_the_digit()

    def die(model: object, tokenizer: object, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_causal_lm", die)
        with pytest.raises(KeyboardInterrupt):
            cached_cold_start(SETTINGS, examples, examples)
    assert not list(own_cache.glob("tiny-*"))
    assert (cached_cold_start(SETTINGS, examples, examples) / "config.json").is_file()


def test_runs_that_start_together_share_one_model(own_cache: Path) -> None:
    examples = repeat_the_digit()
    with ThreadPoolExecutor(3) as pool:
        made = set(pool.map(lambda _: cached_cold_start(SETTINGS, examples, examples), range(3)))
    assert len(made) == 1
    assert list(own_cache.iterdir()) == list(made)


@pytest.mark.parametrize("damaged", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_cached_model_that_was_cut_short_is_made_again(own_cache: Path, damaged: str) -> None:
    examples, said = repeat_the_digit(), []
    made = cached_cold_start(SETTINGS, examples, examples)
    whole = {file.name: file.read_bytes() for file in made.iterdir()}
    (made / damaged).write_bytes(whole[damaged][: len(whole[damaged]) // 2])
    assert cached_cold_start(SETTINGS, examples, examples, say=said.append) == made
    assert {file.name: file.read_bytes() for file in made.iterdir()} == whole
    assert f"the cached model in {made} is damaged" in said[0]
    for file in made.iterdir():
        file.unlink()
    assert (cached_cold_start(SETTINGS, examples, examples) / damaged).is_file()
    assert list(own_cache.iterdir()) == [made]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("I/O error: No space left")])
def test_a_full_disk_is_said_and_leaves_nothing_in_the_cache(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def save(model: object, tokenizer: object, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(module, "save_causal_lm", save)
    with pytest.raises(ColdStartFailed, match=r"cannot write .*No space left; make room there, or .*HEADWAY_CACHE"):
        cached_cold_start(SETTINGS, repeat_the_digit(), repeat_the_digit())
    assert not list(own_cache.iterdir())


def test_a_cache_that_cannot_be_made_is_said_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "file"))
    monkeypatch.delattr(module, "cold_start")
    with pytest.raises(ColdStartFailed, match=r"cannot write .*file"):
        cached_cold_start(SETTINGS, repeat_the_digit(), repeat_the_digit())
