"""A server that registers again at the moment in which it counts as lost."""

from meshloom.service.coordinator.servers import ServerGroup


def test_a_server_that_returns_while_it_is_given_up_is_not_forgotten(
    center, make_spec, monkeypatch
):
    about = [{"name": s.name, "address": s.address} for s in center.servers]
    for server in about:
        center.call("RegisterServer", **server)
    center.call("OpenJob", **make_spec(copies=2))
    noted = []
    note = ServerGroup.note

    def noting(group, name, server):
        noted.append((name, server is not None))
        note(group, name, server)

    monkeypatch.setattr(ServerGroup, "note", noting)

    def say(text, event="note", **fields):
        if event == "server_lost":
            center.call("RegisterServer", **about[0])

    center.coordinator._say = say
    for _ in range(6):
        center.time[0] += 1
        center.call("Beat", name="s1", jobs={})
        center.coordinator.watch()
    assert noted == [("s0", False), ("s0", True)]
