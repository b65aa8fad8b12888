"""Whose word holds: the request's, then the checkpoint's, then the library's."""

from __future__ import annotations

import pytest

from mars_lm.errors import MarsError
from mars_lm.settings import DecodingSettings, MarsSettings, decoding_settings


def mars(**decoding):
    return MarsSettings(mask_token_id=0, decoding=decoding)


@pytest.mark.parametrize(
    ("own", "named", "tau"),
    [
        ({}, {}, 0.0),
        ({}, {"rule": "margin"}, 0.0),
        ({}, {"rule": "entropy"}, 100.0),
        ({}, {"exact": False}, 0.95),
        ({}, {"exact": False, "rule": "margin"}, 0.9),
        ({}, {"exact": False, "rule": "entropy"}, 0.2),
        ({"tau": 0.3}, {}, 0.3),
        ({"tau": 0.3}, {"tau": 0.4}, 0.4),
        ({"tau": 0.3}, {"exact": True}, 0.3),
        # Calibrated for exact mode, asked in lossy mode, and the other way round.
        ({"tau": 0.3}, {"exact": False}, 0.95),
        ({"tau": 0.9, "exact": False}, {}, 0.9),
        ({"tau": 0.9, "exact": False}, {"exact": True}, 0.0),
        ({"tau": 0.3}, {"rule": "entropy"}, 100.0),
    ],
)
def test_the_tau_that_holds(own, named, tau):
    assert decoding_settings(mars(**own), named).tau == tau


def test_an_ordinary_model_is_in_one_token_mode_whatever_is_named():
    settings = decoding_settings(None, {"tau": 0.2, "rule": "entropy", "block_size": 4, "max_new_tokens": 7})
    assert settings.one_token
    assert settings == DecodingSettings(tau=1.0, max_new_tokens=7)


def test_the_width_adapts_by_itself_where_it_moves_no_text():
    assert DecodingSettings().adapts
    assert not DecodingSettings(exact=False, tau=0.9).adapts
    assert DecodingSettings(exact=False, tau=0.9, adaptive=True).adapts
    assert not DecodingSettings(adaptive=False).adapts


def test_a_bad_value_is_refused_whoever_named_it():
    with pytest.raises(MarsError, match="tau is 3"):
        decoding_settings(mars(tau=3), {})
    with pytest.raises(MarsError, match="rule is 'luck'"):
        decoding_settings(mars(rule="luck"), {})
    for name in ("exact", "recovery", "adaptive", "ignore_eos"):  # a text is true in Python, whatever it says
        with pytest.raises(MarsError, match=f"{name} is 'false', expected true or false"):
            decoding_settings(mars(**{name: "false"}), {})
    with pytest.raises(MarsError, match="name warmth"):
        decoding_settings(mars(warmth=1), {})
