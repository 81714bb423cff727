"""Points are read out of what models write, scaled by a stated rule, and never made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qvlopt.scoring.metrics.grounding import Box, Point, parse_box, parse_point, point_in_box, point_in_box_screenspot

SIZE = (200, 100)


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("[500, 250]", (500, 250)),
        ("(0.5, 0.25)", (0.5, 0.25)),
        ("500, 250", (500, 250)),
        ("500 250", (500, 250)),
        ('```json\n[{"point_2d": [500, 250], "label": "ok"}]\n```', (500, 250)),
        ('{"bbox_2d": [100, 200, 300, 400]}', (200, 300)),
        ("I click at (10, 20), no, at (30, 40).", (30, 40)),
        ("<click>[12, 34]</click>", (12, 34)),
        ('{"name": "click", "arguments": {"coordinate": [7, 8]}}', (7, 8)),
        ("click(x=5, y=6)", (5, 6)),
        ("[1, 2, 3, 4]", (2, 3)),
        ("[1, 2, 3]", None),
        ("the button", None),
        ("", None),
        ("step 3 of 5", None),
        ('{"point_2d": [1, "x"]}', None),
    ],
)
def test_points(text: str, point: tuple[float, float] | None) -> None:
    assert parse_point(text) == (None if point is None else Point(*point))


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("[20, 10, 100, 50] px", (0.1, 0.1, 0.5, 0.5)),
        ("[20, 10, 100, 50]", (0.1, 0.1, 0.5, 0.5)),
        ("[0.1, 0.1, 0.5, 0.5]", (0.1, 0.1, 0.5, 0.5)),
        ("[100, 100, 500, 500] /1000", (0.1, 0.1, 0.5, 0.5)),
        ("(0.1 0.1 0.5 0.5) /1", (0.1, 0.1, 0.5, 0.5)),
    ],
)
def test_boxes(text: str, box: tuple[float, ...]) -> None:
    assert parse_box(text, SIZE) == pytest.approx(Box(*box))


@pytest.mark.parametrize("text", ["", "a box", "[1, 2, 3]", "[1, 2, 3, 4, 5]", "[5, 5, 1, 1]", "[1, 2, 3, nan]", "[1, 2, 3, 4] cm"])
def test_what_is_no_box_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected \\[x1"):
        parse_box(text, SIZE)


def test_answers_are_thousandths_or_fractions_and_never_pixels() -> None:
    gold = ["[20, 10, 100, 50] px"]
    assert point_in_box("[100, 100]", gold, SIZE) == 1.0  # the corner itself
    assert point_in_box("[99, 100]", gold, SIZE) == 0.0
    assert point_in_box("(0.5, 0.5)", gold, SIZE) == 1.0
    assert point_in_box("[0, 0]", gold, SIZE) == 0.0
    assert point_in_box("here", gold, SIZE) is None
    assert point_in_box_screenspot("[100, 50]", gold, SIZE) == 1.0
    assert point_in_box_screenspot("[101, 50]", gold, SIZE) == 0.0


@given(st.text(max_size=100))
def test_any_text_is_right_wrong_or_unparsed(text: str) -> None:
    assert point_in_box(text, ["[0, 0, 1000, 1000] /1000"], SIZE) in (0.0, 1.0, None)


@pytest.mark.parametrize("text", ['{"point_2d": [1%s, 5]}', "[1%s, 5]", "1%s, 5"])
def test_a_model_that_repeats_a_digit_is_wrong_and_stops_nothing(text: str) -> None:
    assert point_in_box(text % ("0" * 400), ["[0, 0, 1000, 1000] /1000"], SIZE) == 0.0


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 5000), st.integers(1, 5000))
def test_the_size_of_the_picture_does_not_matter_where_nothing_is_in_pixels(x: int, y: int, width: int, height: int) -> None:
    golds = ["[250, 250, 750, 750] /1000"]
    inside = 250 <= x <= 750 and 250 <= y <= 750
    assert point_in_box(f"[{x}, {y}]", golds, (width, height)) == float(inside)
