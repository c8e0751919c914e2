"""The page and the report in a real browser: the values that are drawn, live, on every size."""

import pytest

from asyncrl.__main__ import main
from tests.helpers.browser import Browser, needs_chromium
from tests.helpers.web_page import drawn, plot, served
from tests.monitor.small_run import SmallRun

pytestmark = [needs_chromium, pytest.mark.timeout(180)]

REWARDS = [s / 100 for s in range(1, 10)]


@pytest.fixture(scope="module")
def one_browser():
    with Browser() as made:
        yield made


@pytest.fixture
def browser(one_browser):
    one_browser.open("about:blank")  # the last page's server has ended
    one_browser.wait("location.href === 'about:blank'")
    one_browser.errors.clear()
    one_browser.asked.clear()
    one_browser.shape(1280, 900)
    return one_browser


@pytest.fixture
def small(tmp_path):
    run = SmallRun(tmp_path / "runs")
    run.grow(6)
    return run


def text_of(browser, name):
    return browser.js(f"document.getElementById('{name}').innerText")


def test_the_page_shows_the_values_and_goes_on(browser, small, tmp_path):
    SmallRun(tmp_path / "runs", name="other").grow(3)
    runs = str(tmp_path / "runs")
    with served("small", "--dir", runs, log=tmp_path / "log") as server:
        browser.open(server.url)
        assert drawn(browser, "reward") == [["reward", [1, 2, 3, 4, 5, 6], REWARDS[:6], None]]
        assert "token" not in browser.js("location.href")
        heat = drawn(browser, "staleness_heat")[0]
        assert (heat[2], heat[3]) == (["0", "1", "2"], [[0.25, 0.5, 0.25]] * 6)
        small.grow(3)
        browser.wait(f"{plot('staleness_heat')}.data[0].x.at(-1) === 9")
        browser.js(f"{plot('reward')}.scrollIntoView()")
        browser.wait(f"{plot('reward')}.data[0].x.at(-1) === 9")
        assert drawn(browser, "reward")[0][2] == REWARDS
        browser.wait("document.getElementById('tiles').innerText.includes('9\\nof 100')")
        assert "the law holds" in text_of(browser, "ledger")
        assert "the next batch on buffer-0" in text_of(browser, "roles")

        boxes = "document.querySelectorAll('#run-list input')"
        browser.js(f"{boxes}.forEach(b => b.checked || b.click())")
        browser.wait(f"{plot('reward')}.data.length === 2")
        assert [[t[0], len(t[1])] for t in drawn(browser, "reward")] == [
            ["small: reward", 9], ["other: reward", 3]
        ]  # fmt: skip
        select = "document.getElementById('axis')"
        browser.js(f"{select}.value = 'wall_s'; {select}.dispatchEvent(new Event('change'))")
        browser.wait(f"{plot('reward')}.data[0].x[0] === 12")

        browser.shape(390, 844, phone=True, dark=True)
        browser.wait("innerWidth === 390")
        assert browser.js("document.documentElement.scrollWidth") <= 390
        assert browser.errors == []
        hosts = {a.split("/")[2] for a in browser.asked if a.startswith("http")}
        assert hosts == {server.url.split("/")[2]}
        assert server.end() == 0
        assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_lines_are_smoothed_and_hover_text_has_what_was_measured(browser, small, tmp_path):
    with served("small", "--dir", str(tmp_path / "runs"), log=tmp_path / "log") as server:
        browser.open(server.url)
        assert drawn(browser, "reward")[0][2] == REWARDS[:6]
        slide(browser, 0.5)
        browser.wait(f"{plot('reward')}.data[0].y[1] !== 0.02")
        mean = weight = 0.0
        expected = []
        for reward in REWARDS[:6]:
            mean, weight = 0.5 * mean + 0.5 * reward, 0.5 * weight + 0.5
            expected.append(mean / weight)
        assert drawn(browser, "reward")[0][2] == pytest.approx(expected)
        assert browser.js(f"{plot('reward')}.data[0].customdata") == REWARDS[:6]
        assert text_of(browser, "smoothed") == "0.50"
        assert drawn(browser, "version")[0][2] == [1, 2, 3, 4, 5, 6], "a count"
        browser.open(server.url)
        browser.wait("document.getElementById('smooth')?.value === '0.5'")
        assert drawn(browser, "reward")[0][2] == pytest.approx(expected)
        slide(browser, 0)
        browser.wait(f"{plot('reward')}.data[0].y[1] === 0.02")
        assert browser.errors == []


def test_any_metric_is_drawn_by_its_name(browser, small, tmp_path):
    with served("small", "--dir", str(tmp_path / "runs"), log=tmp_path / "log") as server:
        browser.open(server.url)
        browser.wait("document.getElementById('any')")
        browser.js("document.getElementById('any').scrollIntoView()")
        names = "[...document.querySelectorAll('#any-names option')].map(o => o.value)"
        browser.wait(f"{names}.length > 20")
        assert {"learner-0/reward/mean", "actor-1/host/cpu_frac"} <= set(browser.js(names))
        wanted = {"learner-0/reward/mean": REWARDS[:6], "actor-1/host/cpu_frac": [0.5] * 6,
                  "learner-0/reward/mea": None, "learner-0/sync/total_s": [0.3] * 6}  # fmt: skip
        for name, y in wanted.items():
            pick(browser, name)
            figure = f"document.querySelector('[data-figure=\"any={name}\"] .plot')"
            if y is None:
                browser.wait(f"{figure}.hidden")
                continue
            browser.wait(
                f"!{figure}.hidden && {figure}.data[0].name === '{name.replace('/', ' ', 1)}'"
            )
            assert browser.js(f"{figure}.data[0].y") == y
        assert browser.errors == []


def pick(browser, name):
    control = "document.getElementById('any')"
    browser.js(f"{control}.value = '{name}'; {control}.dispatchEvent(new Event('change'))")


def slide(browser, to):
    control = "document.getElementById('smooth')"
    browser.js(f"{control}.value = {to}; {control}.dispatchEvent(new Event('input'))")


def test_two_runs_have_an_advice_each_and_room_beside_their_legends(browser, small, tmp_path):
    SmallRun(tmp_path / "runs", name="another-of-some-length").grow(6)
    names = ("small", "another-of-some-length")
    with served(*names, "--dir", str(tmp_path / "runs"), log=tmp_path / "log") as server:
        browser.open(server.url)
        advice = "document.querySelectorAll('#advice > p')"
        browser.wait(f"{advice}.length === 2")
        told = browser.js(f"[...{advice}].map(p => p.innerText.split(':')[0])")
        assert told == list(names)
        assert len(drawn(browser, "staleness")) == 8
        browser.wait(f"{plot('staleness')}._fullLayout._size.h > 150")
        legend = f"{plot('staleness')}.querySelector('.legend .scrollbar')"
        assert browser.js(f"{legend}?.getBoundingClientRect().height ?? 0") == 0, "none is hidden"
        assert browser.errors == []


def test_a_report_opens_alone_and_is_dark_by_the_system_s_or_the_button_s_choice(
    browser, small, tmp_path
):
    out = tmp_path / "r.html"
    assert main(["report", str(small.folder), "-o", str(out)]) == 0
    browser.shape(1280, 900, dark=True)
    browser.open(out.as_uri())
    browser.wait("document.getElementById('written')?.textContent")
    assert drawn(browser, "reward")[0][2] == REWARDS[:6]
    inks = f"[getComputedStyle(document.body).color, {plot('reward')}._fullLayout.font.color]"
    dark = browser.js(inks)
    browser.js("document.getElementById('theme').click()")
    assert text_of(browser, "theme") == "light"
    light = browser.js(inks)
    assert all(a != b for a, b in zip(dark, light, strict=True))
    assert browser.errors == []
    assert [a for a in browser.asked if not a.startswith(("file:", "data:", "blob:"))] == []
