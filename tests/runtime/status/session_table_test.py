import json

import pytest

from tff_dpftrl.runtime.status import session_table


def paper_table():
    """Table 1 of Bonawitz et al. 2019, in thousands."""
    table = session_table.SessionTable()
    for shape, count in (("-v[]+^", 1116), ("-v[]+#", 327), ("-v[!", 30)):
        for _ in range(count):
            table.add(shape)
    return table


def test_percentages_are_those_of_the_paper():
    rows = paper_table().rows()
    assert [(shape, count) for shape, count, _ in rows] == [
        ("-v[]+^", 1116),
        ("-v[]+#", 327),
        ("-v[!", 30),
    ]
    assert [int(percent) for _, _, percent in rows] == [75, 22, 2]


def test_percentages_are_of_those_with_a_plan():
    table = session_table.SessionTable()
    for shape in ("-#", "-#", "-#", "-v[!", "-v[]+^", "-v[]+^", "-v[]+^", "nonsense", "!"):
        table.add(shape)
    assert table.rows() == [
        ("-v[]+^", 3, 75.0),
        ("-v[!", 1, 25.0),
        ("-#", 3, None),
        ("!", 1, None),
        ("other", 1, None),
    ]
    assert table.total == 9
    assert table.to_markdown().splitlines()[-1] == "| `other` | 1 |  |"


def test_what_is_no_shape_counts_as_other():
    table = session_table.SessionTable()
    for shape in ("<script>", "", "-v[]+^^", "-v["):
        assert table.add(shape) == "other"
    assert table.rows() == [("other", 4, None)]


def test_errors_are_known_by_their_ends():
    assert session_table.is_error("-v[*")
    assert session_table.is_error("-?")
    assert not session_table.is_error("-v[]+#")
    assert not session_table.is_error("other")


def test_markdown_is_a_table():
    assert paper_table().to_markdown().splitlines()[2] == "| `-v[]+^` | 1,116 | 75.8 % |"


def test_counts_last(tmp_path):
    path = tmp_path / "sessions.json"
    table = paper_table()
    table.save(path)
    again = session_table.SessionTable.load(path)
    assert again.rows() == table.rows()
    again.add("-v[]+^")
    again.save(path)
    assert session_table.SessionTable.load(path).total == table.total + 1


DAY = 86_400.0


@pytest.mark.parametrize("restarts", [False, True])
def test_sessions_are_forgotten_after_two_to_four_weeks(tmp_path, restarts):
    now = [0.0]
    path = tmp_path / "sessions.json"
    table = session_table.SessionTable(clock=lambda: now[0])
    totals = []
    for day in (0, 13, 15, 27, 30):
        now[0] = day * DAY
        table.add("-v[]+^")
        totals.append(table.total)
        if restarts:
            table.save(path)
            table = session_table.SessionTable.load(path, clock=lambda: now[0])
    assert totals == [1, 2, 3, 4, 3]  # The first period ended with day 15, the second with day 30.
    now[0] = 100 * DAY
    table.add("-#")
    assert table.rows() == [("-#", 1, None)]


def test_counts_of_a_former_version_are_forgotten_in_time(tmp_path):
    now = [0.0]
    path = tmp_path / "sessions.json"
    path.write_text(json.dumps({"version": 1, "session_shapes": {"-v[]+^": 2611}}))
    table = session_table.SessionTable.load(path, clock=lambda: now[0])
    assert table.total == 2611
    now[0] = 15 * DAY
    table.add("-v[]+^")
    assert table.total == 1


def test_a_clock_that_was_set_back_does_not_keep_counts_for_ever(tmp_path):
    path = tmp_path / "sessions.json"
    session_table.SessionTable(clock=lambda: 1e6 * DAY).save(path)
    now = [0.0]
    table = session_table.SessionTable.load(path, clock=lambda: now[0])
    table.add("-#")
    now[0] = 30 * DAY
    table.add("-#")
    assert table.total == 1


def test_no_file_is_an_empty_table(tmp_path):
    assert session_table.SessionTable.load(tmp_path / "none.json").rows() == []


def test_a_time_of_any_size_is_read_or_refused(tmp_path):
    path = tmp_path / "sessions.json"
    shapes = '"session_shapes": {}, "former_session_shapes": {}'
    path.write_text(f'{{"version": 2, "since": {"9" * 400}, {shapes}}}')
    assert session_table.SessionTable.load(path).add("-#") == "-#"
    for since in ("-1", "1e999", "NaN", "null", '"0"'):
        path.write_text(f'{{"version": 2, "since": {since}, {shapes}}}')
        with pytest.raises(ValueError, match="holds no counts"):
            session_table.SessionTable.load(path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"version": 3, "session_shapes": {}}',
        '{"version": 2, "session_shapes": {}, "former_session_shapes": {}}',
        '{"version": 2, "since": 1.0, "session_shapes": {}}',
        '{"version": 2, "since": true, "session_shapes": {}, "former_session_shapes": {}}',
        '{"version": 2, "since": 1.0, "session_shapes": {}, "former_session_shapes": {"of 17": 1}}',
        '{"version": 1}',
        '{"version": 1, "session_shapes": {"-v[]+^": -1}}',
        '{"version": 1, "session_shapes": {"-v[]+^": true}}',
        '{"version": 1, "session_shapes": {"of device 17": 1}}',
    ],
)
def test_other_files_are_refused_by_name(tmp_path, content):
    path = tmp_path / "sessions.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="sessions.json holds no counts"):
        session_table.SessionTable.load(path)
