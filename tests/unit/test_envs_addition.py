import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tiny_tokenizers import tiny_tokenizer

from headway.envs.addition import Addition
from headway.envs.splits import SPLITS
from headway.types import Prompt

TOKENIZER = tiny_tokenizer()


def reward(environment: Addition, prompt: Prompt, text: str) -> float:
    turn = asyncio.run(environment.start(prompt).step(text))
    assert turn.observation is None
    return turn.reward


def test_only_the_exact_reversed_sum_is_rewarded():
    environment = Addition(TOKENIZER)
    prompt = next(p for p in (environment.prompt("train", i) for i in range(9000)) if p.data["question"] == "37+85=")
    assert TOKENIZER.decode(prompt.token_ids) == "37+85="
    assert prompt.data["answer"] == "221"
    assert reward(environment, prompt, "221") == 1.0
    for wrong in ("122", "22", "2210", " 221", "221 ", "", "2 21"):
        assert reward(environment, prompt, wrong) == 0.0


def test_answers_can_be_asked_for_in_reading_order():
    prompt = Addition(TOKENIZER, reversed_answer=False).prompt("test", 3)
    a, b = prompt.data["question"][:-1].split("+")
    assert prompt.data["answer"] == str(int(a) + int(b))


@pytest.mark.parametrize(("digits", "num_pairs"), [(1, 100), (2, 8100), (3, 810_000)])
def test_the_splits_are_disjoint_and_together_hold_every_pair(digits: int, num_pairs: int):
    environment = Addition(TOKENIZER, digits=digits)
    members = [set(environment._splits[split].tolist()) for split in SPLITS]
    assert sum(len(m) for m in members) == len(set.union(*members)) == num_pairs
    assert environment.size("train") == pytest.approx(0.8 * num_pairs, rel=0.15)
    assert environment.size("test") == pytest.approx(0.1 * num_pairs, rel=0.6)


def test_the_same_index_is_the_same_question_and_another_seed_splits_otherwise():
    one, two, other = (Addition(TOKENIZER, seed=seed) for seed in (0, 0, 1))
    questions = [[e.prompt("validation", i).data["question"] for i in range(50)] for e in (one, two, other)]
    assert questions[0] == questions[1] != questions[2]


def test_the_first_questions_of_a_split_span_all_operands():
    environment = Addition(TOKENIZER)
    firsts = [int(environment.prompt("validation", i).data["question"].split("+")[0]) for i in range(100)]
    assert min(firsts) < 25 and max(firsts) > 85


def test_examples_are_the_split_with_answers_ended_by_end_of_text():
    environment = Addition(TOKENIZER, digits=1)
    examples = environment.examples("test")
    assert len(examples) == environment.size("test")
    for index, (prompt_ids, answer_ids) in enumerate(examples):
        prompt = environment.prompt("test", index)
        assert np.array_equal(prompt_ids, prompt.token_ids)
        assert answer_ids[-1] == TOKENIZER.eos_token_id == environment.stop_token_ids[0]
        assert reward(environment, prompt, str(TOKENIZER.decode(answer_ids[:-1]))) == 1.0


def test_prompts_survive_being_rebuilt_from_their_data():
    environment = Addition(TOKENIZER)
    prompt = environment.prompt("train", 0)
    assert reward(environment, replace(prompt, data=dict(prompt.data)), prompt.data["answer"]) == 1.0


def test_too_many_digits_and_a_tokenizer_without_end_are_refused():
    with pytest.raises(ValueError, match="1, 2 or 3"):
        Addition(TOKENIZER, digits=4)
    endless = tiny_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="eos_token"):
        Addition(endless)
