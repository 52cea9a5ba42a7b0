"""Word problems with a calculator: `<calc>3*(4+5)</calc>` is answered `3*(4+5) = 27`, as often as asked."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.envs import chat
from headway.envs.arithmetic import CalculatorError, evaluate, show
from headway.envs.grading import AnswerFormat
from headway.envs.gsm8k import Gsm8k
from headway.envs.turns import Turn
from headway.types import Ints, Prompt, Split

INSTRUCTION = (
    "You have a calculator: write <calc>3*(4+5)</calc>, end your message, and you are told the result. "
    "Use it as often as you need. When you know the final answer, put it in \\boxed{}."
)
MAX_CALLS = 8
"""Calculations answered in one message; the rest of them is ignored."""

_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)


class Calculator:
    """GSM8K-format questions (see `Gsm8k` for their source) over several turns.

    A message with `<calc>…</calc>` is answered with the results and ends nothing; one without is the final answer,
    rewarded 1 or 0. An episode that never comes to an answer has reward 0; the rollout's `max_turns` ends it.
    `tool_role`: the chat role that results are shown under; `tool` only if the tokenizer's template knows it.
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
        tool_role: str = "user",
    ) -> None:
        self._questions = Gsm8k(
            tokenizer,
            path=path,
            dataset=dataset,
            subset=subset,
            seed=seed,
            answer_format=answer_format,
            instruction=instruction,
        )
        self._tokenizer = tokenizer
        self._tool_role = tool_role
        self.stop_token_ids = self._questions.stop_token_ids

    def size(self, split: Split) -> int:
        return self._questions.size(split)

    def prompt(self, split: Split, index: int) -> Prompt:
        return self._questions.prompt(split, index)

    def start(self, prompt: Prompt) -> "CalculatorEpisode":
        return CalculatorEpisode(self._questions, prompt)

    def observe(self, text: str, after_stop: bool) -> Ints:
        return chat.observation_ids(self._tokenizer, self._tool_role, text, after_stop)


@dataclass(frozen=True, slots=True)
class CalculatorEpisode:
    """Answers calculations until a message holds none."""

    questions: Gsm8k
    prompt: Prompt

    async def step(self, text: str) -> Turn:
        calls = _CALL.findall(text)
        if calls:
            return Turn(0.0, "\n".join(map(answer_call, calls[:MAX_CALLS])))
        return Turn(self.questions.grade(self.prompt, text))


def answer_call(expression: str) -> str:
    """`expression = value`, or why there is none."""
    expression = " ".join(expression.split())
    try:
        return f"{expression} = {show(evaluate(expression))}"
    except CalculatorError as error:
        return f"error: {error}"
