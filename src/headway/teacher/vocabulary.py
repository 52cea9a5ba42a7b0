"""Whether an id means the same token to teacher and student."""

from collections.abc import Mapping
from typing import Any

from headway.errors import HeadwayError


class OtherVocabulary(HeadwayError, ValueError):
    """Teacher and student do not share their token ids; scores of one would be read as those of another token."""


def check_vocabulary(
    student: Mapping[str, int], teacher: Mapping[str, int], *, teacher_rows: int | None = None, teacher_name: str
) -> None:
    """Every token has the same id in both, and the teacher's head has a row for each.

    `student` and `teacher` are tokenizers' `get_vocab()`. Rows of a head beyond the vocabulary are padding and may
    differ. Raises OtherVocabulary naming the first token that differs.
    """
    if differing := sorted(t for t in student.keys() | teacher.keys() if student.get(t) != teacher.get(t)):
        token = min(differing, key=lambda t: min(student.get(t, 1 << 60), teacher.get(t, 1 << 60)))
        raise OtherVocabulary(
            f"distill.teacher = {teacher_name!r} has another vocabulary: {len(differing)} tokens differ, first "
            f"{token!r} (id {_id(student, token)} for the student, {_id(teacher, token)} for the teacher); choose a "
            "teacher of the student's own tokenizer"
        )
    if teacher_rows is not None and teacher_rows <= max(student.values()):
        raise OtherVocabulary(
            f"distill.teacher = {teacher_name!r} has a head of {teacher_rows} rows, but the vocabulary reaches id "
            f"{max(student.values())}"
        )


def _id(vocabulary: Mapping[str, int], token: str) -> Any:
    return vocabulary.get(token, "none")
