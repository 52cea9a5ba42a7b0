"""GSM8K-format questions, the calculator over them, and their sources."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scripted import ScriptedEngine, completion
from tiny_tokenizers import chatml_tokenizer

from headway.envs.calculator import Calculator, answer_call
from headway.envs.gsm8k import Gsm8k
from headway.envs.splits import SPLITS
from headway.rollout import run_episode
from headway.types import Sampling

TOKENIZER = chatml_tokenizer()


def rows(count: int, first: int = 0) -> list[dict[str, str]]:
    return [
        {
            "question": f"Mira has {n} boxes of {n + 2} pears. How many pears has she?",
            "answer": f"{n}*{n + 2} = <<{n}*{n + 2}={n * (n + 2)}>>{n * (n + 2):,}\n#### {n * (n + 2):,}",
        }
        for n in range(first, first + count)
    ]


def write(path: Path, questions: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in questions))
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write(tmp_path / "questions.jsonl", rows(200))


def all_questions(environment: Gsm8k) -> dict[str, list[str]]:
    return {
        split: [environment.prompt(split, i).data["question"] for i in range(environment.size(split))]
        for split in SPLITS
    }


def test_one_file_is_split_into_disjoint_parts_the_same_way_each_time(questions: Path):
    splits = all_questions(Gsm8k(TOKENIZER, path=questions))
    assert sorted(q for part in splits.values() for q in part) == sorted(r["question"] for r in rows(200))
    assert min(len(part) for part in splits.values()) >= 8
    assert splits == all_questions(Gsm8k(TOKENIZER, path=questions))
    assert splits != all_questions(Gsm8k(TOKENIZER, path=questions, seed=1))


def test_a_question_keeps_its_split_when_others_are_added(tmp_path: Path):
    few = all_questions(Gsm8k(TOKENIZER, path=write(tmp_path / "few.jsonl", rows(50))))
    many = all_questions(Gsm8k(TOKENIZER, path=write(tmp_path / "many.jsonl", rows(100))))
    assert all(set(few[split]) <= set(many[split]) for split in SPLITS)


def test_a_folder_keeps_its_own_splits_and_no_question_stands_in_two(tmp_path: Path):
    write(tmp_path / "train.jsonl", rows(100))
    write(tmp_path / "test.jsonl", rows(20, first=90))
    splits = all_questions(Gsm8k(TOKENIZER, path=tmp_path))
    assert splits["test"] == [r["question"] for r in rows(20, first=90)]
    assert len(splits["train"]) + len(splits["validation"]) == 90
    assert splits["validation"] and not set(splits["validation"]) & set(splits["train"])
    assert not set(splits["test"]) & {*splits["train"], *splits["validation"]}


def test_a_dataset_library_source_keeps_its_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = tmp_path / "source"
    source.mkdir()
    write(source / "train.jsonl", rows(30))
    write(source / "test.jsonl", rows(5, first=50))
    splits = all_questions(Gsm8k(TOKENIZER, dataset=str(source), subset=None))
    assert splits["test"] == [r["question"] for r in rows(5, first=50)]
    assert sorted(splits["train"] + splits["validation"]) == sorted(r["question"] for r in rows(30))


def test_the_prompt_is_the_question_in_the_chat_template(questions: Path):
    prompt = Gsm8k(TOKENIZER, path=questions, instruction="Be brief.").prompt("train", 0)
    text = str(TOKENIZER.decode(prompt.token_ids))
    assert text.endswith(f"<|im_start|>user\n{prompt.data['question']}\n\nBe brief.<|im_end|>\n<|im_start|>assistant\n")
    json.dumps(prompt.data)


def test_only_the_right_number_is_rewarded(questions: Path):
    environment = Gsm8k(TOKENIZER, path=questions)
    prompt = environment.prompt("test", 1)

    async def reward(text: str) -> float:
        return (await environment.start(prompt).step(text)).reward

    assert asyncio.run(reward(f"Thus \\boxed{{{prompt.data['answer']}}}.")) == 1.0
    assert asyncio.run(reward(f"Thus {prompt.data['answer']}1.")) == 0.0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"question": "a"}\n', r"bad\.jsonl:1 needs the text fields"),
        ('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "2"}\n', r"bad\.jsonl:2.*####"),
        ("[1\n", r"bad\.jsonl:1 is not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, complaint: str):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        Gsm8k(TOKENIZER, path=tmp_path / "bad.jsonl")


def test_missing_sources_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"either task\.options\.path"):
        Gsm8k(TOKENIZER)
    with pytest.raises(ValueError, match="no questions at"):
        Gsm8k(TOKENIZER, path=tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match=r"train\.jsonl and test\.jsonl"):
        Gsm8k(TOKENIZER, path=tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"headway\[datasets\]"):
        Gsm8k(TOKENIZER, dataset="some/name")


def test_calculations_are_answered_until_the_final_answer(questions: Path):
    """A whole episode through the rollout: the calculator's words are in the tokens, and not in the mask."""
    environment = Calculator(TOKENIZER, path=questions)
    prompt = environment.prompt("train", 0)
    stop = TOKENIZER.eos_token_id

    def say(text: str):
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), stop]
        return completion(ids, [3] * len(ids))

    turns = ["I need <calc>3*(4+5)</calc> and <calc>1/0</calc>", f"So \\boxed{{{prompt.data['answer']}}}"]
    engine = ScriptedEngine([say(turn) for turn in turns])
    response = asyncio.run(
        run_episode(
            engine,
            environment,
            prompt,
            Sampling(max_tokens=100, stop_token_ids=environment.stop_token_ids),
            decode=lambda ids: str(TOKENIZER.decode(list(ids), skip_special_tokens=True)),
            max_response_tokens=300,
            max_turns=4,
        )
    )
    assert response.reward == 1.0 and response.num_turns == 2
    shown = TOKENIZER.decode(response.token_ids[~response.mask])
    assert shown == ("\n<|im_start|>user\n3*(4+5) = 27\nerror: division by zero<|im_end|>\n<|im_start|>assistant\n")
    assert TOKENIZER.decode(response.token_ids[response.mask]) == "<|im_end|>".join([*turns, ""])
    assert np.array_equal(engine.requests[1][0][: len(prompt.token_ids)], prompt.token_ids)


def test_an_episode_that_only_calculates_earns_nothing(questions: Path):
    environment = Calculator(TOKENIZER, path=questions)
    prompt = environment.prompt("train", 0)
    turn = asyncio.run(environment.start(prompt).step(f"<calc>{prompt.data['answer']}</calc>"))
    assert turn.reward == 0.0 and turn.observation == f"{prompt.data['answer']} = {prompt.data['answer']}"


def test_calls_are_bounded_in_number_and_size(questions: Path):
    environment = Calculator(TOKENIZER, path=questions)
    turn = asyncio.run(environment.start(environment.prompt("train", 0)).step("<calc>1+1</calc>" * 1000))
    assert turn.observation is not None and turn.observation.count("1+1 = 2") == 8
    assert answer_call("9**9**9") == "error: the number is too large"
    assert len(answer_call("1+" * 5000)) < 100
