"""Procedural tasks of the reasoning-gym library, by name: `reasoning_gym:chain_sum`."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from headway.envs import chat
from headway.envs.splits import SPLITS, split_by_hash
from headway.envs.turns import SingleTurn
from headway.errors import nearest
from headway.types import Ints, Prompt, Split

INSTRUCTION = "Think step by step, and give the final answer between <answer> and </answer>."

MAX_ANSWER_LENGTH = 10_000

EVALUATES_ANSWERS = frozenset(
    {
        "binary_matrix",
        "composite",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Tasks whose scorer passes the answer to Python's eval, itself or through sympy: a policy could run code."""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym:
    """The first `size` questions of a task with `seed`, split 80/10/10 by hash of the question, each once.

    Reward is the task's own score (0 to 1) of the text in the last `<answer>…</answer>`, else of the last line.
    `config` holds the task's own settings, such as `{"max_terms": 3}`. Needs the extra `reasoning-gym`.
    Raises ValueError for an unknown task or setting, and for tasks that evaluate answers as Python.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        task: str,
        size: int = 1000,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        instruction: str = INSTRUCTION,
    ) -> None:
        self._dataset = _create(task, {**(config or {}), "size": size, "seed": seed})
        # Small tasks repeat themselves; a question must not stand in two splits.
        entries = {entry["question"]: entry for entry in (self._dataset[i] for i in range(size))}
        positions = split_by_hash(list(entries), seed)
        self._entries = {split: [list(entries.values())[i] for i in positions[split]] for split in SPLITS}
        self._tokenizer = tokenizer
        self._instruction = instruction
        self.stop_token_ids = chat.stop_token_ids(tokenizer)

    def size(self, split: Split) -> int:
        return len(self._entries[split])

    def prompt(self, split: Split, index: int) -> Prompt:
        entry = self._entries[split][index]
        content = f"{entry['question']}\n\n{self._instruction}".strip()
        token_ids = chat.prompt_ids(self._tokenizer, [{"role": "user", "content": content}])
        return Prompt(index, split, token_ids, {"question": entry["question"], "answer": entry["answer"]})

    def start(self, prompt: Prompt) -> SingleTurn:
        return SingleTurn(partial(self._score, self._entries[prompt.split][prompt.index]))

    def observe(self, text: str, after_stop: bool) -> Ints:
        return chat.observation_ids(self._tokenizer, "user", text, after_stop)

    def _score(self, entry: dict[str, Any], text: str) -> float:
        return float(self._dataset.score_answer(extract_answer(text), entry))


def extract_answer(text: str) -> str | None:
    """The text in the last `<answer>…</answer>`, else the last line that is not blank; None when there is none."""
    tagged = _ANSWER.findall(text)
    lines = tagged[-1:] or text.strip().splitlines()[-1:]
    return lines[0].strip()[:MAX_ANSWER_LENGTH] if lines else None


def _create(task: str, settings: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError("reasoning_gym tasks need an extra: pip install 'headway[reasoning-gym]'") from error
    if task in EVALUATES_ANSWERS:
        raise ValueError(f"reasoning_gym task {task!r} evaluates answers as Python code, so it is not offered")
    if task not in DATASETS:
        raise ValueError(f"unknown reasoning_gym task {task!r}; {nearest(task, DATASETS)}")
    known = DATASETS[task][1].__dataclass_fields__
    for name in settings:
        if name not in known:
            raise ValueError(f"unknown setting {name!r} of reasoning_gym:{task}; {nearest(name, known)}")
    return reasoning_gym.create_dataset(task, **settings)
