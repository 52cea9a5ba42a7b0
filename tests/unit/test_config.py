"""Settings: refused early, by name, with the mend."""

import importlib.util
from pathlib import Path

import pytest

from headway.config import ConfigError, RunConfig, Section, load_config, parse_config


def test_the_defaults_survive_a_round_trip_through_toml(tmp_path: Path):
    path = tmp_path / "config.toml"
    path.write_text(RunConfig().to_toml())
    assert load_config(path) == RunConfig()


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"max_stalenes": 3}, "unknown key 'max_stalenes'; did you mean 'max_staleness'"),
        ({"optimizer": {"learning_rate": 1.0}}, "unknown key 'optimizer.learning_rate'"),
        ({"optimizer": {"lrr": 1.0}}, "did you mean 'optimizer.lr'"),
        ({"batch_size": 10, "group_size": 4}, "set batch_size to 8 or 12"),
        ({"max_staleness": -1}, r"max_staleness: expected a whole number at least 0 \(given -1\)"),
        ({"over_bound": "reject"}, r"over_bound: expected 'wait', 'drop' or 'mask' \(given 'reject'\)"),
        ({"optimizer": {"lr": "abc"}}, r"^optimizer.lr: expected a number greater than 0, or 'law' \(given 'abc'\)$"),
        (
            {"optimizer": {"lr": float("nan")}},
            r"optimizer.lr: expected a number greater than 0, or 'law' \(given nan, which is not finite\)$",
        ),
        ({"optimizer": 3}, r"^optimizer: expected a table \(given 3\)"),
        ({"record": "maybe"}, r"^record: expected true or false \(given 'maybe'\)"),
        ({"report": {"sinks": ["wand"]}}, r"report.sinks: expected a list, each 'tensorboard', 'wandb' or 'trackio'"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_with_the_mend(values, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_config(values)


def test_all_unknown_keys_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_config({"algoritm": "grpo", "task": {"nam": "x"}})
    assert "algorithm" in str(caught.value) and "task.nam" in str(caught.value)


def test_overrides_reach_nested_keys_and_keep_their_types():
    config = load_config(None, ["algorithm=estr", "optimizer.lr=1e-3", "record=true", "task.options.digits=3"])
    assert (config.algorithm, config.optimizer.lr, config.record) == ("estr", 1e-3, True)
    assert config.task.options == {"digits": 3}


@pytest.mark.parametrize("override", ["algorithm", "=3", "seed.x=1"])
def test_a_malformed_override_is_refused(override):
    with pytest.raises(ConfigError):
        load_config(None, ["seed=1", override])


def test_a_missing_or_broken_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="no config file"):
        load_config(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        load_config(tmp_path / "broken.toml")


def test_every_setting_of_the_file_is_explained():
    sections = [RunConfig, *(type(value) for value in RunConfig().__dict__.values() if isinstance(value, Section))]
    undocumented = [
        f"{section.__name__}.{name}"
        for section in sections
        for name, field in section.model_fields.items()
        if not field.description and not isinstance(field.default, Section)
    ]
    assert undocumented == []


def test_derived_quantities_follow_the_knobs():
    derived = parse_config({"batch_size": 32, "group_size": 4, "max_staleness": 2}).derived
    assert derived["groups per step"] == 8
    assert derived["capacity, groups"] == 24
    assert derived["capacity, responses"] == 96
    assert derived["responses per step"] == 32
    assert derived["most response tokens in flight"] == 96 * 8


def test_the_configuration_page_is_what_the_settings_say():
    script = Path(__file__).parents[2] / "scripts" / "write_configuration.py"
    spec = importlib.util.spec_from_file_location("write_configuration", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run python scripts/write_configuration.py"
