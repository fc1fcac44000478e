"""Old names of configuration keys are accepted with one warning."""

import logging

import pytest

from mars_platform.config import _warn_renamed, build_settings
from mars_platform.errors import UserError
from mars_serve.config.settings import ServeSettings
from mars_serve.engine.settings import EngineSettings


def settings(**engine):
    content = {"models": [{"name": "m", "path": "p", "engine": engine}]}
    return build_settings(content, ServeSettings, source="serve.yaml").models[0].engine


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("max_batch", "max_num_seqs", 7),
        ("max_positions", "max_num_batched_tokens", 99),
        ("reuse_prefixes", "enable_prefix_caching", False),
    ],
)
def test_an_old_name_means_the_new_one_and_is_warned_about_once(caplog, old, new, value):
    _warn_renamed.cache_clear()  # another test may have had the warning
    with caplog.at_level(logging.WARNING):
        found = [settings(**{old: value}) for _ in range(2)]
    assert found == [EngineSettings(**{new: value})] * 2
    assert [each.message for each in caplog.records] == [
        f"config: the key {old} is now called {new}; rename it"
    ]
    with pytest.raises(UserError, match=f"models.0.engine: {old} is the old name of {new}"):
        settings(**{old: value, new: value})
