"""What a job records: who came and went, checkpoints, and what was taken back."""


def play(house) -> None:
    house.start()
    for learner in range(2):
        house.ask("join", learner=learner)
    house.initialize()
    for round in (1, 2):
        for learner in range(2):
            house.stage(learner, 1, round, 1.0)
            house.contribute(learner, 1, round, round - 1)


def test_who_came_and_went_is_recorded_once(make_house):
    house = make_house()
    play(house)
    house.ask("leave", learner=1, incarnation=1, reason="signal 9")
    expected = [
        ("joined", {"learner": 0, "incarnation": 1}),
        ("joined", {"learner": 1, "incarnation": 1}),
        ("checkpoint", {"version": 2}),
        (
            "left",
            {"learner": 1, "incarnation": 1, "reason": "signal 9", "failed": False},
        ),
    ]
    assert house.events == expected
    house.start()  # takes all of it up again
    assert house.events == expected


def test_what_a_restart_takes_back_is_recorded(make_house):
    house = make_house(save_every=1)
    play(house)
    for server in house.servers:
        server.lose()
    (house.folder / "run" / "service" / "2" / "manifest.json").unlink()
    house.events.clear()
    house.start()
    reason = "the servers do not have its newest version"
    assert house.events[-1] == (
        "rolled_back",
        {"version": 1, "abandoned": 1, "reason": reason},
    )
    assert [event for event, _ in house.events] == ["note", "unusable", "rolled_back"]
