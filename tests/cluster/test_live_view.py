"""Answers that stream at once, on a terminal and elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from cluster.demo_prompts import demo_prompts, long_report
from cluster.live_view import LineView, PanelView


def make_console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=80, highlight=False, color_system=None), out


def test_lines_carry_their_answers_name_and_never_mix() -> None:
    console, out = make_console(terminal=False)
    view = LineView(console)
    with view.showing(()):
        view.text("one", "first ")
        view.text("two", "second\nthird")
        view.text("one", "half\n")
        view.ended("two")
        view.ended("one")
    assert out.getvalue().splitlines() == ["two     | second", "one     | first half", "two     | third"]


def test_a_long_line_is_cut_at_a_space_without_losing_text() -> None:
    console, out = make_console(terminal=False)
    view = LineView(console)
    words = [f"word{number}" for number in range(60)]
    view.text("one", " ".join(words))
    view.ended("one")
    lines = [line.partition("| ")[2] for line in out.getvalue().splitlines()]
    assert len(lines) > 3
    assert " ".join(lines).split() == words


def test_markup_in_an_answer_is_text() -> None:
    console, out = make_console(terminal=False)
    view = LineView(console)
    view.text("one", "a[bold]b[/nonsense]\n")
    assert "a[bold]b[/nonsense]" in out.getvalue()


def test_panels_end_with_all_of_every_answer() -> None:
    console, out = make_console(terminal=True)
    view = PanelView(console)
    prompts = demo_prompts()
    with view.showing(prompts):
        for prompt in prompts:
            view.text(prompt.name, "".join(f"line {n} of {prompt.name}\n" for n in range(9)))
            view.ended(prompt.name)
    final = out.getvalue()
    assert all(f"line {n} of {prompt.name}" in final for prompt in prompts for n in range(9))


def test_the_demo_has_five_prompts_and_a_long_one_that_is_always_the_same() -> None:
    assert [prompt.name for prompt in demo_prompts()] == ["chat", "code", "french", "short", "report"]
    assert long_report() == long_report()
    assert len(long_report().split()) > 1200
