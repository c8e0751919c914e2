"""The server of `asyncrl monitor --web`: who is let in, what is answered, what stays untouched."""

import socket

import pytest
from starlette.testclient import TestClient

from asyncrl.errors import UserError
from asyncrl.monitor.web.app import make_app
from asyncrl.monitor.web.serve import serve, told
from asyncrl.monitor.web.shelf import Shelf
from tests.monitor.small_run import SmallRun

TOKEN = "a-token-of-a-test"


@pytest.fixture
def run(tmp_path):
    made = SmallRun(tmp_path)
    made.grow(5)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "status.json").write_text("no run")
    return made


@pytest.fixture
def client(run, tmp_path):
    app = make_app(Shelf(tmp_path), ["small"], TOKEN)
    with TestClient(app, base_url="http://127.0.0.1:80", follow_redirects=False) as made:
        yield made


@pytest.fixture
def known(client):
    client.headers["authorization"] = f"Bearer {TOKEN}"
    return client


PATHS = (
    "/", "/static/page.js", "/static/plotly.js", "/api/runs", "/api/catalogue", "/nowhere",
    "/api/runs/small/status", "/api/runs/small/lines/metrics", "/api/figures?run=small",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", ["none", "query", "empty", "cookie", "bearer", "prefix"])
def test_without_the_token_nothing_is_told(client, path, how):
    wrong = {"prefix": TOKEN[:-1]}.get(how, "wrong")
    if how in ("query", "empty", "prefix"):
        path += ("&" if "?" in path else "?") + f"token={'' if how == 'empty' else wrong}"
    headers = {"cookie": {"cookie": f"asyncrl_monitor_80={wrong}"},
               "bearer": {"authorization": f"Bearer {wrong}"}}.get(how, {})  # fmt: skip
    answer = client.get(path, headers=headers)
    assert answer.status_code == 401
    assert "small" not in answer.text
    assert "set-cookie" not in answer.headers


def test_a_page_keeps_the_token_as_a_cookie_and_its_address_loses_it(client):
    answer = client.get(f"/?token={TOKEN}&run=small")
    assert (answer.status_code, answer.headers["location"]) == (303, "/?run=small")
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=Lax" in answer.headers["set-cookie"]
    assert client.get("/?run=small").status_code == 200
    assert client.get("/api/runs").status_code == 200
    assert client.get("/api/runs?token=wrong").status_code == 401, "the cookie does not help"


def test_every_answer_has_the_headers_that_keep_others_out(known):
    for path in PATHS:
        headers = known.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert "unsafe" not in headers["content-security-policy"].split("style-src")[0]
    assert "'unsafe-eval'" not in headers["content-security-policy"]


@pytest.mark.parametrize(
    "path",
    ["/api/runs/../../etc/passwd", "/api/runs/..%2fsecret/status", "/api/runs/secret/status",
     "/api/runs/small%2f..%2fsecret/status", "/static/../app.py", "/static/..%2fapp.py",
     "/api/runs/small/..%2f..%2fsecret%2fstatus.json", "/api/runs/small/lines/..%2fconfig.yaml",
     "/api/runs/small/logs%2fx.log", "/api/runs/%00/status", "/api/runs/small/lines/status"],
)  # fmt: skip
def test_only_known_names_lead_anywhere(known, path):
    assert known.get(path).status_code == 404


def test_it_reads_and_no_more(known):
    for method in ("post", "put", "delete", "patch"):
        assert getattr(known, method)("/api/runs/small/status").status_code == 405


def test_figures_come_whole_and_then_what_is_new(known, run):
    first = known.get("/api/figures?run=small&axis=step&figure=reward&figure=replay").json()
    assert first["replay"]["figure"] is None
    assert first["reward"]["figure"]["data"][0]["y"] == [0.01, 0.02, 0.03, 0.04, 0.05]
    rev = first["reward"]["rev"]
    again = known.get(f"/api/figures?run=small&figure=reward:{rev}").json()
    assert again == {}
    run.grow(2)

    def news():
        return known.get(f"/api/figures?run=small&figure=reward:{rev}").json().get("reward")

    from tests.helpers.eventually import eventually

    eventually(news, "it is read on")
    assert news()["data"] == [{"grow": {"x": [5, [6.0, 7.0]], "y": [5, [0.06, 0.07]]}}]


@pytest.mark.parametrize(
    "query",
    ["run=small&axis=nonsense", "axis=step", "run=small&figure=reward:-1&axis=",
     "run=nobody&figure=reward"],
)  # fmt: skip
def test_a_wrong_question_is_refused(known, query):
    assert known.get(f"/api/figures?{query}").status_code in (400, 404)


def test_odd_revisions_and_names_are_taken_for_none(known):
    answer = known.get(
        "/api/figures?run=small&figure=reward:9x&figure=nothing&figure=loss:" + "9" * 99
    )
    assert {name: "figure" in news for name, news in answer.json().items()} == {
        "reward": True, "loss": True
    }  # fmt: skip


def test_lines_come_whole_from_any_byte_on(known, run):
    whole = (run.folder / "metrics.jsonl").read_bytes()
    got, at = b"", 0
    while True:
        answer = known.get(f"/api/runs/small/lines/metrics?from={at}")
        if not answer.content:
            break
        got, at = got + answer.content, int(answer.headers["x-next"])
    assert got == whole
    with (run.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"torn": ')
    assert known.get(f"/api/runs/small/lines/metrics?from={at}").content == b""
    (run.folder / "metrics.jsonl").write_bytes(b'{"another": "file"}\n')
    answer = known.get(f"/api/runs/small/lines/metrics?from={at}")
    assert (answer.headers["x-from"], answer.content) == ("0", b'{"another": "file"}\n')
    assert known.get("/api/runs/small/lines/metrics?from=x").status_code == 400


def test_panels_and_files(known, run):
    state = known.get("/api/runs/small/state").json()
    assert (state["step"], state["steps"], state["over"]) == (5, 100, False)
    assert state["roles"][0]["waits"] == ["1.5 s for the next batch on buffer-0"]
    assert dict(state["finals"])["reward, last 10"] == "0.030"
    assert dict(state["ledger"]["terms"])["failed"] == 8
    assert known.get("/api/runs/small/status").json()["run_id"] == "small-1"
    assert "max_staleness" in known.get("/api/runs/small/config").text
    assert known.get("/api/runs/small/summary").status_code == 404
    for torn in ("{torn", '{"schema": 1}'):
        (run.folder / "status.json").write_text(torn)
        assert known.get("/api/runs/small/state").json()["roles"] == []
    assert [r["name"] for r in known.get("/api/runs").json()["runs"]] == ["small"]


def test_a_run_that_begins_later_is_found(known, run, tmp_path):
    assert known.get("/api/runs/late/state").status_code == 404
    SmallRun(tmp_path, name="late")
    assert known.get("/api/runs/late/state").status_code == 200


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    one, two = SmallRun(tmp_path / "a"), SmallRun(tmp_path / "b")
    shelf = Shelf(tmp_path / "a", [two.folder, one.folder])
    names = shelf.names()
    assert sorted(names) in (["a-small", "small"], ["b-small", "small"])
    assert {shelf.name_of(one.folder), shelf.name_of(two.folder)} == set(names)


def test_log_lines_come_once_and_in_order_of_time(known, run):
    logs = run.folder / "logs"
    (logs / "actor-0.log").write_text(
        "2026-11-30T08:00:02.000Z WARNING asyncrl.actors.worker: second\n"
    )
    (logs / "learner-0.log").write_text("2026-11-30T08:00:01.000Z INFO asyncrl.x: <b>first\n")
    first = known.get("/api/runs/small/log").json()
    assert [(x["role"], x["level"], x["text"]) for x in first["lines"]] == [
        ("learner-0", "INFO", "<b>first"), ("actor-0", "WARNING", "second")
    ]  # fmt: skip
    assert known.get(f"/api/runs/small/log?after={first['next']}").json()["lines"] == []
    with (logs / "actor-0.log").open("a") as file:
        file.write("2026-11-30T08:00:03.000Z ERROR asyncrl.x: third\n")
    news = known.get(f"/api/runs/small/log?after={first['next']}").json()
    assert [x["text"] for x in news["lines"]] == ["third"]
    assert len(known.get("/api/runs/small/log?after=99").json()["lines"]) == 3, "another server's"


def test_an_address_that_cannot_be_served_is_the_user_s_to_mend(run, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port} cannot be served.*take another port"):
            serve([run.folder], tmp_path, host="127.0.0.1", port=port, tell=print)


@pytest.mark.parametrize(
    ("host", "lines"), [("127.0.0.1", 2), ("localhost", 2), ("::1", 2), ("0.0.0.0", 3)]
)
def test_whoever_serves_beyond_this_machine_is_told_what_that_means(host, lines):
    said = list(told(host, 80, "t"))
    assert len(said) == lines
    assert said[0] == f"http://{'[::1]' if host == '::1' else host}:80/?token=t"
    assert ("not encrypted" in said[1]) == (lines == 3)
