"""How texts of the log are made."""

from lockstep.process.output import join_names


def test_names_are_joined_up_to_a_limit():
    assert join_names(["a", "b"], 2) == "a, b"
    assert join_names(["a", "b", "c"], 2) == "a, b, …"
    assert join_names([], 2) == ""
