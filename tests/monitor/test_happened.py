"""Events as screens tell them."""

from asyncrl.monitor.reading.happened import MOST, Happened


def event(kind, role="learner", wall_s=1.0, **more):
    return {"event": kind, "role": role, "rank": 0, "wall_s": wall_s, "version": 3} | more


def told(happened, n=60):
    return [(e["at"], e["event"], e["count"], e["more"]) for e in happened.newest(n)]


def test_what_happens_all_the_time_is_one_line_until_something_else_happens():
    happened = Happened()
    happened.add(event("training", "launcher"))
    for k in range(1, 13):
        happened.add(event("publication", wall_s=float(k), publication=f"0:{k}"))
        if k % 5 == 0:
            happened.add(event("checkpoint", wall_s=float(k), batch=k, path=f"step-{k}"))
    happened.add(event("actor_died", "launcher", 13.0, reason="killed"))
    happened.add(event("publication", wall_s=14.0, publication="1:13"))
    assert told(happened) == [
        ("0:01", "training", 1, ""),
        ("0:10", "checkpoint", 2, "batch 10, path step-10"),
        ("0:12", "publication", 12, "versions 1 to 12"),
        ("0:13", "actor_died", 1, "reason killed"),
        ("0:14", "publication", 1, "version 13"),
    ]
    assert told(happened, 1) == told(happened)[-1:]
    assert [e["role"] for e in happened.newest(2)] == ["launcher", "learner-0"]


def test_other_fields_are_told_and_the_oldest_go():
    happened = Happened()
    for k in range(MOST + 5):
        happened.add(event("weights_cut_out", member=f"actor-{k}", publication=f"0:{k}", none=None))
    assert len(happened.newest(2 * MOST)) == MOST
    assert told(happened, 1)[0][3] == f"version {MOST + 4}, member actor-{MOST + 4}"
    assert told(happened, MOST)[0][3] == "version 5, member actor-5"


def test_what_is_no_event_harms_nothing():
    happened = Happened()
    happened.add({"event": 7, "wall_s": float("inf"), "publication": ["x"]})
    assert happened.newest(1)[0]["at"] == "-"
