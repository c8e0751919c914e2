"""What a page gets of a figure that grew, together with what it has, is the figure."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.monitor.web.delta import Revisions, delta


def applied(old, news):
    """As the page's script does it."""
    if "figure" in news:
        return news["figure"]
    data = []
    for trace, change in zip(old["data"], news["data"], strict=True):
        if "set" in change:
            data.append(change["set"])
            continue
        grown = dict(trace)
        for key, (keep, add) in change.get("grow", {}).items():
            grown[key] = grown[key][:keep] + add
        data.append(grown)
    return {"data": data, "layout": news["layout"] or old["layout"]}


values = st.lists(st.integers(0, 2), max_size=6)
traces = st.fixed_dictionaries({"name": st.sampled_from("ab"), "x": values, "y": values})
figures = st.fixed_dictionaries(
    {
        "data": st.lists(traces, max_size=3),
        "layout": st.fixed_dictionaries({"t": st.integers(0, 1)}),
    }
)


@given(figures, figures)
def test_a_difference_leads_to_the_new_figure(old, new):
    less = delta(old, new)
    assert less is None or applied(old, less) == new


@given(st.lists(st.tuples(figures | st.none(), st.booleans()), min_size=1, max_size=12))
def test_a_page_that_asks_now_and_then_has_the_newest(history):
    revisions, have, shown = Revisions(), None, None
    for stamp, (figure, asks) in enumerate(history):
        other = revisions.ask("k", stamp, lambda f=figure: f, None)
        assert other["figure"] == figure
        if asks:
            news = revisions.ask("k", stamp, lambda: 1 / 0, have)
            if news is not None:
                have, shown = news["rev"], applied(shown, news)
            assert shown == figure


def test_only_what_is_new_is_sent():
    revisions = Revisions()
    figure = {"data": [{"name": "a", "x": list(range(1000))}], "layout": {}}
    have = revisions.ask("k", 1, lambda: figure, None)["rev"]
    longer = {"data": [{"name": "a", "x": list(range(1001))}], "layout": {}}
    news = revisions.ask("k", 2, lambda: longer, have)
    assert news == {
        "rev": have + 1, "base": have, "layout": None,
        "data": [{"grow": {"x": [1000, [1000]]}}],
    }  # fmt: skip
    assert revisions.ask("k", 2, lambda: longer, have + 1) is None
    assert revisions.ask("k", 3, lambda: longer, have + 1) is None, "drawn again, it is the same"
