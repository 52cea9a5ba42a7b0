"""Grade-school word problems in the GSM8K format: a question, and a worked answer that ends in `#### 42`."""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headway.envs import chat
from headway.envs.grading import AnswerFormat, is_correct
from headway.envs.splits import SPLITS, split_by_hash
from headway.envs.turns import SingleTurn
from headway.types import Ints, Prompt, Split

INSTRUCTION = "Think step by step, and put the final answer in \\boxed{}."


class Gsm8k:
    """Reward 1 when the final answer is the right number (math-verify), else 0.

    Give `path`, a JSONL file with fields `question` and `answer`, or a folder with `train.jsonl`, `test.jsonl` and
    perhaps `validation.jsonl`; or `dataset` (and `subset`), a name for the `datasets` library. One file is split
    80/10/10 by hash of (seed, question). A source with its own train and test keeps them; a missing validation
    split is a tenth of train. A question that stands in two splits stays only in the later one.

    `answer_format`: `boxed` takes only `\\boxed{…}`, `any` also the last number. `instruction` follows the question.
    Raises ValueError naming the file and line that are wrong.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        path: str | Path | None = None,
        dataset: str | None = None,
        subset: str | None = "main",
        seed: int = 0,
        answer_format: AnswerFormat = "any",
        instruction: str = INSTRUCTION,
    ) -> None:
        if (path is None) == (dataset is None):
            raise ValueError(
                "questions come from either task.options.path (a JSONL file) or task.options.dataset (a name for "
                "`datasets`)"
            )
        if answer_format not in ("any", "boxed"):
            raise ValueError(f"gsm8k answer_format must be 'any' or 'boxed', got {answer_format!r}")
        source = _read_path(Path(path)) if path is not None else _read_dataset(str(dataset), subset)
        self._splits = _assign_splits(source, seed)
        self._tokenizer = tokenizer
        self._answer_format: AnswerFormat = answer_format
        self._instruction = instruction
        self.stop_token_ids = chat.stop_token_ids(tokenizer)

    def size(self, split: Split) -> int:
        return len(self._splits[split])

    def prompt(self, split: Split, index: int) -> Prompt:
        question, answer = self._splits[split][index]
        content = f"{question}\n\n{self._instruction}".strip()
        token_ids = chat.prompt_ids(self._tokenizer, [{"role": "user", "content": content}])
        return Prompt(index, split, token_ids, {"question": question, "answer": answer})

    def start(self, prompt: Prompt) -> SingleTurn:
        return SingleTurn(partial(self.grade, prompt))

    def grade(self, prompt: Prompt, text: str) -> float:
        """1.0 if the final answer in `text` is the prompt's, else 0.0."""
        return float(is_correct(text, prompt.data["answer"], self._answer_format))

    def observe(self, text: str, after_stop: bool) -> Ints:
        return chat.observation_ids(self._tokenizer, "user", text, after_stop)


Question = tuple[str, str]
"""Question and final number."""


def _read_path(path: Path) -> dict[str, list[Question]]:
    if path.is_dir():
        files = {split: path / f"{split}.jsonl" for split in SPLITS}
        found = {split: _read_jsonl(file) for split, file in files.items() if file.is_file()}
        if not {"train", "test"} <= found.keys():
            raise ValueError(f"{path} must hold train.jsonl and test.jsonl; it holds {sorted(found) or 'neither'}")
        return found
    if not path.is_file():
        raise ValueError(f"no questions at {path}: give the path of a JSONL file with question and answer")
    return {"all": _read_jsonl(path)}


def _read_jsonl(path: Path) -> list[Question]:
    with path.open(encoding="utf-8") as lines:
        return [
            _question(_json_object(line, f"{path}:{number}"), f"{path}:{number}")
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]


def _json_object(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error


def _read_dataset(name: str, subset: str | None) -> dict[str, list[Question]]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]  an extra
    except ImportError as error:
        raise ImportError("gsm8k by dataset name needs an extra: pip install 'headway[datasets]'") from error
    parts: Any = load_dataset(name, subset)
    named = {key: [_question(row, f"{name}[{key}]") for row in rows] for key, rows in parts.items()}
    return named if {"train", "test"} <= named.keys() else {"all": [q for rows in named.values() for q in rows]}


def _question(row: Any, where: str) -> Question:
    if not isinstance(row, Mapping) or not all(isinstance(row.get(f), str) for f in ("question", "answer")):
        raise ValueError(f"{where} needs the text fields 'question' and 'answer'")
    _, marker, number = row["answer"].rpartition("####")
    number = number.strip().replace(",", "").replace("$", "")
    if not marker or not number:
        raise ValueError(f"{where}: the answer must end in '#### ' and a number, got {row['answer'][-40:]!r}")
    return row["question"].strip(), number


def _assign_splits(source: dict[str, list[Question]], seed: int) -> dict[Split, list[Question]]:
    if "all" in source:
        questions = _unique(source["all"], set())
        positions = split_by_hash([question for question, _ in questions], seed)
        return {split: [questions[i] for i in positions[split]] for split in SPLITS}
    seen: set[str] = set()
    test = _unique(source["test"], seen)
    validation = _unique(source.get("validation", []), seen)
    train = _unique(source["train"], seen)
    if not validation:
        positions = split_by_hash([question for question, _ in train], seed)
        validation = [train[i] for i in positions["validation"]]
        train = [train[i] for i in [*positions["train"], *positions["test"]]]
    return {"train": train, "validation": validation, "test": test}


def _unique(questions: Iterable[Question], seen: set[str]) -> list[Question]:
    """Those not in `seen`, which grows by them."""
    kept = []
    for question in questions:
        if question[0] not in seen:
            seen.add(question[0])
            kept.append(question)
    return kept
