"""Stop strings over any cut of the text into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.stop_strings import StopStrings


def shown(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    state = StopStrings(stops)
    text = ""
    for piece in pieces:
        text += state.push(piece)
        if state.hit is not None:
            return text, state.hit
    return text + state.flush(), None


def test_a_stop_string_across_pieces_cuts_the_text_before_it():
    assert shown(["one E", "N", "D two"], ["END"]) == ("one ", "END")


def test_a_beginning_that_comes_to_nothing_is_shown_in_the_end():
    assert shown(["one E", "N"], ["END"]) == ("one EN", None)


def test_text_that_cannot_begin_a_stop_string_is_not_held_back():
    assert StopStrings(["END"]).push("one") == "one"


def test_only_the_possible_beginning_is_held_back():
    state = StopStrings(["END"])
    assert state.push("one EEN") == "one E"
    assert state.push("x") == "ENx"


def test_the_earliest_of_several_stop_strings_counts():
    assert shown(["abcdef"], ["ef", "cd"]) == ("ab", "cd")


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_character_by_character_the_first_completed_stop_string_cuts(text, stops, data):
    """The oracle: the shortest beginning of the text that holds a stop string, cut where that string begins."""
    expected = text
    for end in range(1, len(text) + 1):
        found = [at for stop in stops if (at := text[:end].find(stop)) >= 0]
        if found:
            expected = text[: min(found)]
            break
    assert shown(list(text), stops)[0] == expected


@given(st.lists(st.text("abc", max_size=4), max_size=8), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_what_is_shown_never_holds_a_stop_string_and_begins_the_text(pieces, stops):
    text, hit = shown(pieces, stops)
    whole = "".join(pieces)
    assert whole.startswith(text)
    assert not any(stop in text for stop in stops)
    assert (hit is None) == (not any(stop in whole for stop in stops))
    if hit is None:
        assert text == whole
