import asyncio
import inspect
import re
import sys

import pytest
from tiny_tokenizers import chatml_tokenizer

from headway.envs.reasoning_gym import EVALUATES_ANSWERS, ReasoningGym, extract_answer
from headway.envs.splits import SPLITS

pytest.importorskip("reasoning_gym")
TOKENIZER = chatml_tokenizer()


def reward(environment: ReasoningGym, index: int, text: str) -> float:
    return asyncio.run(environment.start(environment.prompt("train", index)).step(text)).reward


def test_the_tasks_own_score_is_the_reward():
    environment = ReasoningGym(TOKENIZER, task="chain_sum", size=50, seed=1)
    answer = environment.prompt("train", 3).data["answer"]
    assert reward(environment, 3, f"<answer>1</answer> no, <answer> {answer} </answer>.") == 1.0
    assert reward(environment, 3, f"I think\n{answer}\n") == 1.0
    assert reward(environment, 3, f"<answer>{answer}7</answer>") < 1.0
    assert reward(environment, 3, "") == 0.0


def test_questions_are_deterministic_configurable_and_in_one_split_only():
    def questions(seed: int) -> dict[str, list[str]]:
        config = {"max_terms": 2, "max_digits": 1}
        environment = ReasoningGym(TOKENIZER, task="chain_sum", size=150, seed=seed, config=config)
        return {s: [environment.prompt(s, i).data["question"] for i in range(environment.size(s))] for s in SPLITS}

    splits = questions(5)
    everything = [q for part in splits.values() for q in part]
    assert len(everything) == len(set(everything)) < 150  # one-digit sums repeat themselves
    assert splits == questions(5) != questions(6)
    assert all(re.search(r"\b\d [+-] \d =", q) for q in everything)


def test_the_prompt_asks_for_tags():
    prompt = ReasoningGym(TOKENIZER, task="gcd", size=10).prompt("train", 0)
    text = str(TOKENIZER.decode(prompt.token_ids))
    assert prompt.data["question"] in text and "<answer>" in text and text.endswith("assistant\n")


def test_unknown_tasks_and_settings_get_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'chain_sum'"):
        ReasoningGym(TOKENIZER, task="chain_sums")
    with pytest.raises(ValueError, match="did you mean 'max_terms'"):
        ReasoningGym(TOKENIZER, task="chain_sum", config={"max_term": 3})


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"headway\[reasoning-gym\]"):
        ReasoningGym(TOKENIZER, task="chain_sum")


def test_tasks_that_evaluate_answers_are_refused_and_none_is_overlooked():
    """Finds every dataset class whose code evaluates something called an answer."""
    from reasoning_gym.factory import DATASETS

    evaluates = re.compile(r"(?<!\.)\b(?:eval|exec)\(answer|parse_expr\(answer|sympify\(|literal_eval\(answer")
    found = {name for name, (kind, _) in DATASETS.items() if evaluates.search(inspect.getsource(kind))}
    assert found and found | {"composite"} == EVALUATES_ANSWERS
    with pytest.raises(ValueError, match="evaluates answers as Python"):
        ReasoningGym(TOKENIZER, task="countdown")


def test_answers_are_in_the_last_tag_or_on_the_last_line():
    assert extract_answer("<answer>1</answer> <answer>\n2\n</answer> bye") == "2"
    assert extract_answer("so\n 3 \n\n") == "3"
    assert extract_answer(" \n") is None
