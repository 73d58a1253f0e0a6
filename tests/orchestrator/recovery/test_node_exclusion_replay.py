"""The benchmark's replay of a record of faults, on one that is small enough to count by hand."""

from benchmarks.node_exclusion import NodeOutage, always, faults, ours, replay, second_fault_policy


def event(node: str, at: float, kind: str, what: str = "GPU") -> dict[str, object]:
    return {"node_id": node, "event_time": at, "event_type": f"fault_{kind}", "fault_type": {"Class": what}}


def test_a_fault_within_the_time_after_a_repair_is_prevented() -> None:
    trace = [NodeOutage("a", 1.0, 2.0), NodeOutage("a", 2.5, 3.0), NodeOutage("b", 4.0, 5.0), NodeOutage("a", 9.0, 9.5)]
    prevented, given_up = replay(trace, 10, 10.0, always(1.0))
    assert prevented == 1 / 4
    assert given_up == (1.0 + 1.0 + 1.0 + 0.5) / 100  # after 2.0 (repaired anew in between), 3.0, 5.0 and 9.5
    assert replay(trace, 10, 10.0, always(0.0)) == (0.0, 0.0)
    assert replay(trace, 10, 10.0, second_fault_policy(7.0))[0] == 1 / 4
    assert replay(trace, 10, 10.0, ours(7.0))[0] == 1 / 4


def test_what_operators_do_on_purpose_is_no_fault() -> None:
    events = [
        event("a", 1.0, "start"),
        event("a", 2.0, "end"),
        event("b", 1.0, "start", "Test"),
        event("b", 2.0, "end", "Test"),
    ]
    assert faults(events) == [NodeOutage("a", 1.0, 2.0)]
