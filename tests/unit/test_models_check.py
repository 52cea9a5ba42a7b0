"""A model or teacher that cannot be there is refused before a folder is made or the Hub is asked."""

import pytest

from headway.config import ConfigError, parse_config
from headway.runtime.task import check_models


@pytest.mark.parametrize(
    ("values", "mend"),
    [
        ({"distill": {"teacher": "tiny:3mm"}}, r"distill\.teacher = 'tiny:3mm': did you mean 'tiny:3m'"),
        ({"model": {"path": "tiny:0.4"}}, r"model\.path = 'tiny:0\.4': did you mean 'tiny:0\.4m'"),
        ({"distill": {"teacher": "tiny3m"}}, r"no model folder at tiny3m.*did you mean 'tiny:3m'"),
        ({"distill": {"teacher": "./nosuch"}}, r"distill\.teacher: no model folder at \./nosuch"),
        ({"distill": {"teacher": "127.0.0.1:8000"}}, "a server's URL, which begins with http://"),
        ({"model": {"path": "nosuch"}}, r"model\.path: no model folder at nosuch.*a Hub id like org/name"),
    ],
)
def test_what_cannot_be_there_is_refused_with_the_mend(values: dict[str, object], mend: str):
    with pytest.raises(ConfigError, match=mend):
        check_models(parse_config(values))


@pytest.mark.parametrize("teacher", ["", "tiny:3m", "org/name", "http://127.0.0.1:8000"])
def test_what_may_be_there_is_not(teacher: str):
    check_models(parse_config({"distill": {"teacher": teacher}}))
