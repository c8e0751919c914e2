"""The server's cost: what was seen before is drawn again only when it is earned."""

import doctest

from asyncrl.monitor.reading import budget
from asyncrl.monitor.web.delta import Revisions


def test_the_example_holds():
    assert doctest.testmod(budget).failed == 0


def test_a_figure_that_nobody_has_seen_is_drawn_whatever_it_costs_and_others_wait():
    revisions, draws = Revisions(), []

    def draw():
        draws.append(1)
        return {"data": [], "layout": {"n": len(draws)}}

    first = revisions.ask("k", 1, draw, None, fresh=False)
    assert first["figure"]["layout"] == {"n": 1}
    assert revisions.ask("k", 2, draw, first["rev"], fresh=False) is None
    assert revisions.ask("k", 2, draw, first["rev"])["rev"] == first["rev"] + 1
    assert len(draws) == 2
