"""Models and tokenizers to and from folders, and scoring tokens with them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from headway.models.loading import load_causal_lm, load_tokenizer, named_weights, save_causal_lm
from headway.models.policy import response_gathered_logprobs, response_logprobs
from headway.models.tiny import TINY_SIZES, build_tiny, character_tokenizer, tiny_model


def untied_llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=57,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("make", [tiny_model, untied_llama])
def test_a_saved_model_loads_in_transformers_with_the_same_weights(make, tmp_path: Path) -> None:
    model = make()
    save_causal_lm(model, character_tokenizer(), tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[6, 10, 13, 11]])
    assert plain(ids).logits.equal(model(ids).logits)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = named_weights(load_causal_lm(tmp_path))
    assert weights.keys() == saved.keys()
    assert all(weights[name].equal(saved[name]) for name in saved)


def test_named_weights_follow_training_and_hold_a_tied_head_once() -> None:
    model = tiny_model()
    weights = named_weights(model)
    assert "lm_head.weight" not in weights and "lm_head.weight" in named_weights(untied_llama())
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(3.0)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert (weights["model.embed_tokens.weight"] == 3).all()
    assert not any(tensor.requires_grad for tensor in weights.values())


def test_tokenizer_files_are_carried_over_unchanged(tmp_path: Path) -> None:
    source, target = build_tiny(tmp_path / "source"), tmp_path / "target"
    save_causal_lm(tiny_model(seed=1), source, target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    with pytest.raises(FileNotFoundError, match="no tokenizer files"):
        save_causal_lm(tiny_model(), tmp_path, target)


def test_missing_models_are_named_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model folder at .*nowhere.*config\.json"):
        load_causal_lm(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"neither config\.json nor a tokenizer"):
        load_causal_lm(tmp_path)
    build_tiny(tmp_path / "tiny")
    (tmp_path / "tiny" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load_causal_lm(tmp_path / "tiny")
    with pytest.raises(FileNotFoundError, match="no model folder at"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    build_tiny(tmp_path)
    torch.save(named_weights(tiny_model()), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize("size", TINY_SIZES)
def test_tiny_models_have_their_size_and_depend_on_the_seed_alone(size: str) -> None:
    model, again, other = tiny_model(size, 0), tiny_model(size, 0), tiny_model(size, 1)
    millions = {"0.4m": 0.4, "0.4m-wide": 0.4, "3m": 3, "3m-wide": 3, "moe": 1.3}[size]
    assert model.num_parameters() == pytest.approx(millions * 1e6, rel=0.05)
    weights = named_weights(model)
    assert all(weights[name].equal(tensor) for name, tensor in named_weights(again).items())
    assert not weights["model.embed_tokens.weight"].equal(named_weights(other)["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match="choose one of"):
        tiny_model("7b")


def test_the_character_tokenizer_survives_saving_and_merges_nothing(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(build_tiny(tmp_path))
    text = "37+85=122\n what is  2*3 - 1? a.b"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.encode("é") == tokenizer.encode("?")
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode(text + "<eos>"), skip_special_tokens=True) == text
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id


@pytest.mark.parametrize("make", [tiny_model, untied_llama])
def test_response_logprobs_equal_the_whole_models_log_softmax(make) -> None:
    model = make()
    ids = torch.randint(3, 57, (3, 9), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([9, 6, 4])
    attention_mask = (torch.arange(9) < lengths.unsqueeze(1)).long()
    predict_mask = attention_mask.bool() & (torch.arange(9) >= 3)
    logp = (model(ids, attention_mask=attention_mask).logits / 0.7).log_softmax(-1)
    expected = torch.zeros(3, 9)
    expected[:, 1:] = logp[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    expected_entropy = torch.zeros(3, 9)
    expected_entropy[:, 1:] = -(logp.exp() * logp).sum(-1)[:, :-1]

    logprobs, entropy = response_logprobs(model, ids, attention_mask, predict_mask, temperature=0.7)
    torch.testing.assert_close(logprobs, expected * predict_mask, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy * predict_mask, atol=1e-5, rtol=0)
    gathered, _ = response_gathered_logprobs(
        model, ids, attention_mask, predict_mask, torch.stack([ids, ids + 0], -1), temperature=0.7
    )
    torch.testing.assert_close(gathered, logprobs.unsqueeze(-1).expand(-1, -1, 2))

    coefficients = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    parameters = list(model.parameters())
    ours = torch.autograd.grad((coefficients * logprobs).sum(), parameters)
    theirs = torch.autograd.grad((coefficients * expected * predict_mask).sum(), parameters)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_what_lies_in_the_padding_changes_nothing() -> None:
    model = tiny_model()
    ids = torch.tensor([[6, 10, 13, 11, 8, 17, 4, 2, 0, 0]])
    attention_mask, predict_mask = (ids != 0).long(), torch.zeros_like(ids, dtype=torch.bool)
    predict_mask[0, 6:8] = True
    expected, _ = response_logprobs(model, ids, attention_mask, predict_mask)
    other = ids.masked_fill(attention_mask == 0, 9)
    got, _ = response_logprobs(model, other, attention_mask, predict_mask)
    assert got.equal(expected)
    short, _ = response_logprobs(model, ids[:, :8], attention_mask[:, :8], predict_mask[:, :8])
    torch.testing.assert_close(expected[:, :8], short, atol=1e-6, rtol=0)


def test_scoring_refuses_what_it_cannot_do_exactly() -> None:
    model, ids = tiny_model(), torch.tensor([[6, 10]])
    with pytest.raises(ValueError, match="first token"):
        response_logprobs(model, ids, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool))
    model.config.final_logit_softcapping = 30.0
    mask = torch.tensor([[False, True]])
    with pytest.raises(ValueError, match="final_logit_softcapping = 30"):
        response_logprobs(model, ids, torch.ones_like(ids), mask)
