"""Adding two numbers, the answer written backwards so that carries run in reading order."""

from typing import Any

import numpy as np

from headway.envs.splits import split_by_hash
from headway.envs.turns import SingleTurn
from headway.types import Ints, Prompt, Split

MOST_EXAMPLES = 100_000
"""For a cold start: it draws a few hundred thousand at most, and all three-digit sums would take minutes to encode."""


class Addition:
    """`37+85=` is answered `221`, then the end-of-text token; reward 1 for exactly that, else 0.

    All pairs of `digits`-digit numbers (1 to 3 digits), split 80/10/10 by hash of (seed, pair). `tokenizer`
    knows the ten digits, `+`, `=` and an end-of-text token. `reversed_answer=False` asks for `122`.
    """

    def __init__(self, tokenizer: Any, *, digits: int = 2, reversed_answer: bool = True, seed: int = 0) -> None:
        if not 1 <= digits <= 3:
            raise ValueError(f"addition digits must be 1, 2 or 3, got {digits}: every pair is enumerated")
        if tokenizer.eos_token_id is None:
            raise ValueError("addition needs a tokenizer with an eos_token, which ends the answer")
        self._tokenizer = tokenizer
        self._reversed = reversed_answer
        first = 10 ** (digits - 1) if digits > 1 else 0
        operands = [str(n) for n in range(first, 10**digits)]
        self._questions = np.array([f"{a}+{b}=" for a in operands for b in operands])
        self._splits = split_by_hash(self._questions.tolist(), seed)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (self._tokenizer.eos_token_id,)

    def size(self, split: Split) -> int:
        return len(self._splits[split])

    def prompt(self, split: Split, index: int) -> Prompt:
        question = str(self._questions[self._splits[split][index]])
        data = {"question": question, "answer": self._answer(question)}
        return Prompt(index, split, self._encode(question), data)

    def start(self, prompt: Prompt) -> SingleTurn:
        answer = prompt.data["answer"]
        return SingleTurn(lambda text: float(text == answer))

    def observe(self, text: str, after_stop: bool) -> Ints:
        raise NotImplementedError("addition is answered in one turn and shows no observations")

    def examples(self, split: Split) -> list[tuple[Ints, Ints]]:
        """`(prompt_ids, answer_ids with end-of-text)` of a split, at most `MOST_EXAMPLES`, for a cold start."""
        questions = [str(question) for question in self._questions[self._splits[split][:MOST_EXAMPLES]]]
        prompts = self._encode_all(questions)
        answers = self._encode_all([self._answer(question) for question in questions])
        eos = np.array([self._tokenizer.eos_token_id], np.int32)
        return [(prompt, np.concatenate([answer, eos])) for prompt, answer in zip(prompts, answers, strict=True)]

    def _answer(self, question: str) -> str:
        a, b = question.removesuffix("=").split("+")
        total = str(int(a) + int(b))
        return total[::-1] if self._reversed else total

    def _encode_all(self, texts: list[str]) -> list[Ints]:
        """All at once: one call each would be ten times slower."""
        return [np.array(ids, np.int32) for ids in self._tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def _encode(self, text: str) -> Ints:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int32)
