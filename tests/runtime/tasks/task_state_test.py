"""States of tasks as they are committed."""

import pytest

from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.tasks import task_state

_SEEN = participation_histograms.ObservedRounds(3, None, 2, 1, 4, 2)
_STATE = task_state.TaskState("ab" * 32, _SEEN, b"secret\n\xff\n")


def test_what_was_written_is_read():
    content = _STATE.to_bytes()
    assert task_state.TaskState.from_bytes(content, "ab" * 32) == _STATE
    assert task_state.observed(content, "ab" * 32) == _SEEN
    assert "secret" not in repr(_STATE)


def test_a_state_from_before_contradictions_were_counted_is_read():
    content = _STATE.to_bytes()
    for name in (b"contradicting_reports", b"contradicting_rounds"):
        count = b"4" if name.endswith(b"reports") else b"2"
        assert (field := b'"%s": %s, ' % (name, count)) in content
        content = content.replace(field, b"")
    seen = task_state.observed(content, "ab" * 32)
    assert seen == participation_histograms.ObservedRounds(3, None, 2, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not that of a task with plans"),
        (_STATE.to_bytes()[:30], "cannot be read"),
        (_STATE.to_bytes().replace(b"min_sep", b"max_sep"), "cannot be read"),
        (_STATE.to_bytes().replace(b'reports": 4', b'reports": -4'), "cannot be read"),
        (_STATE.to_bytes().replace(b"ab", b"cd"), "other terms or plans"),
    ],
)
def test_another_state_is_refused(content, message):
    with pytest.raises(task_state.StateError, match=message):
        task_state.TaskState.from_bytes(content, "ab" * 32)
    with pytest.raises(task_state.StateError, match=message):
        task_state.observed(content, "ab" * 32)
