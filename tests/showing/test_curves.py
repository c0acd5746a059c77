"""Pictures of numbers along an axis."""

import functools

import numpy as np

from mha_haiku.showing import canvas, curves


def _lines(axes):
    return {line.get_label(): np.array(line.get_data()) for line in axes.lines}


def test_a_learning_curve_has_what_was_reported_and_the_baseline():
    reports = [{"step": 5 * i, "loss": 3.0 - i, "accuracy": i / 4} for i in range(3)]
    reports[2]["held_out_loss"] = 1.5
    sheet = curves.learning(
        reports, title="a $title", baseline={"loss": 2.5}, baseline_name="chance"
    )
    loss, accuracy = sheet.axes
    lines = _lines(loss)
    training = lines["training, mean since the last report"]
    assert training.tolist() == [[0, 5, 10], [3, 2, 1]]
    assert lines["held-out"].tolist() == [[10], [1.5]]
    baseline = lines["baseline: chance"]
    assert baseline[1].tolist() == [2.5, 2.5]
    assert set(_lines(accuracy)) == {"training, mean since the last report"}
    draw = functools.partial(curves.learning, reports, title="a $title")
    assert canvas.content(draw).startswith(b"\x89PNG")


def test_a_pruning_curve_goes_down_to_the_right():
    left, right = curves.pruning(
        [4, 2, 0],
        {"this order": [0.9, 0.8, 0.1]},
        {"measured": [1, 2, 3], "by operations": [1, 3, 4]},
        {},
        metric_name="accuracy",
        title="title",
    ).axes
    assert left.lines[0].get_ydata().tolist() == [0.9, 0.8, 0.1]
    assert left.get_xlim()[0] > left.get_xlim()[1]
    lines = _lines(right)
    assert lines["measured"].tolist() == [[4, 2, 0], [1, 2, 3]]
    assert lines["by operations"].tolist() == [[4, 2, 0], [1, 3, 4]]
