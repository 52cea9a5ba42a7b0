import asyncio
import statistics
from pathlib import Path

import pytest
from tiny_tokenizers import tiny_tokenizer

from headway.envs import WithLatency, make_environment
from headway.envs.addition import Addition
from headway.envs.latency import SlowEpisode

TOKENIZER = tiny_tokenizer()


def test_environments_are_made_by_name_with_their_options():
    environment = make_environment("addition", tokenizer=TOKENIZER, digits=1)
    assert isinstance(environment, Addition)
    assert environment.size("train") < 100
    task = make_environment("reasoning_gym:chain_sum", tokenizer=TOKENIZER, size=10)
    assert task.prompt("train", 0).data["answer"]


def test_unknown_names_and_options_get_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'addition'"):
        make_environment("adition", tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="did you mean 'reasoning_gym:<task>'"):
        make_environment("reasoning_gim:chain_sum", tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="unknown option 'digit' of Addition; did you mean 'digits'"):
        make_environment("addition", tokenizer=TOKENIZER, digit=3)


def test_a_class_of_ones_own_is_imported_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_tasks.py").write_text(
        "class Echo:\n    def __init__(self, tokenizer, *, word='a'):\n        self.word = word\n"
    )
    (tmp_path / "my_broken.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    environment = make_environment("my_tasks:Echo", tokenizer=TOKENIZER, word="b")
    assert environment.word == "b"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="no 'Ecko'; did you mean 'Echo'"):
        make_environment("my_tasks:Ecko", tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="did you mean 'word'"):
        make_environment("my_tasks:Echo", tokenizer=TOKENIZER, wort="b")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
        make_environment("my_broken:Echo", tokenizer=TOKENIZER)


def delays(environment: WithLatency, index: int, attempts: int) -> list[float]:
    episodes = [environment.start(environment.prompt("train", index)) for _ in range(attempts)]
    return [episode.delay() for episode in episodes]


def test_latency_is_long_tailed_with_its_mean_and_the_same_for_the_same_attempt():
    environment = WithLatency(Addition(TOKENIZER, digits=1), mean_s=0.2)
    times = delays(environment, 0, 4000)
    assert statistics.mean(times) == pytest.approx(0.2, rel=0.1)
    assert statistics.median(times) == pytest.approx(0.2 * 0.607, rel=0.1)
    assert max(times) > 1.0
    again = WithLatency(Addition(TOKENIZER, digits=1), mean_s=0.2)
    assert delays(again, 1, 1) != times[:1]
    assert delays(again, 0, 10) == times[:10]


def test_a_slow_environment_answers_like_the_fast_one_only_later():
    inner = Addition(TOKENIZER, digits=1)
    environment = WithLatency(inner, mean_s=0.02, sigma=0.0)
    prompt = environment.prompt("test", 0)
    episode = environment.start(prompt)
    assert isinstance(episode, SlowEpisode)

    async def timed() -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        assert (await episode.step(prompt.data["answer"])).reward == 1.0
        return loop.time() - started

    assert asyncio.run(timed()) >= 0.019
    assert environment.stop_token_ids == inner.stop_token_ids
    assert environment.size("train") == inner.size("train")


def test_impossible_latencies_are_refused():
    with pytest.raises(ValueError, match="mean_s"):
        WithLatency(Addition(TOKENIZER, digits=1), mean_s=-1)
