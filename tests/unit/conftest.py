"""What the unit tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def a_mask_costs_nothing(request, monkeypatch):
    """Commands report forwards and accepted lengths: there every mask pays, whatever the machine is doing."""
    if "test_cli_" not in request.node.nodeid:
        return
    from mars_lm.decoding import engine
    from mars_lm.decoding.width import ForwardCost

    class Flat(ForwardCost):
        def learn(self, tokens, seconds):
            pass

    monkeypatch.setattr(engine, "forward_cost", lambda *_: Flat({1: 1.0, 8: 1.0, 32: 1.0}))
