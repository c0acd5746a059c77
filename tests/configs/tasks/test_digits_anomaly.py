import numpy as np
import pytest
from sklearn import datasets

from configs.tasks import digits_anomaly
from mha_haiku import tasks
from tests.training.tasks.examples import sampled


def make(sequence_length=6, held_out_fraction=0.2):
    options = {"held_out_fraction": held_out_fraction}
    return tasks.make("digits_anomaly", sequence_length=sequence_length, **options)


def digits_by_image():
    digits = datasets.load_digits()
    images = (digits.data / 16).astype(np.float32)
    return {
        image.tobytes(): int(digit)
        for image, digit in zip(images, digits.target, strict=True)
    }


def images_of(part):
    return {image.tobytes() for image in part.pixels}


def test_all_but_the_target_are_one_digit_and_no_image_comes_twice():
    known = digits_by_image()
    batch = sampled(make())
    for inputs, target in list(zip(*batch[:2], strict=True))[:256]:
        digits = [known[image.tobytes()] for image in inputs]
        odd = digits.pop(target)
        assert len(set(digits)) == 1 and odd not in digits
        assert len({image.tobytes() for image in inputs}) == 6
    np.testing.assert_array_equal(batch.weights, np.ones(4096))


def test_digits_and_positions_are_uniform():
    task = make()
    batch = sampled(task)
    positions = np.bincount(batch.targets, minlength=6) / 4096
    np.testing.assert_allclose(positions, np.full(6, 1 / 6), atol=0.03)
    known = digits_by_image()
    odd = batch.inputs[np.arange(4096), batch.targets]
    for images in (odd, batch.inputs[np.arange(4096), (batch.targets + 1) % 6]):
        digits = [known[image.tobytes()] for image in images]
        frequencies = np.bincount(digits, minlength=10) / 4096
        np.testing.assert_allclose(frequencies, np.full(10, 0.1), atol=0.02)


def test_parts_share_no_image_and_are_all_of_them():
    task = make()
    train, held_out = images_of(task.train_data), images_of(task.held_out_data)
    assert not train & held_out
    assert train | held_out == set(digits_by_image())
    assert len(task.train_data.pixels) + len(task.held_out_data.pixels) == 1797
    np.testing.assert_allclose(len(task.held_out_data.pixels) / 1797, 0.2, atol=0.01)


def test_examples_come_from_the_data_they_are_given():
    task = make()
    for data in (task.train_data, task.held_out_data):
        drawn = sampled(task, data=data).inputs.reshape(-1, 64)
        images = {image.tobytes() for image in drawn}
        assert images <= images_of(data)
        assert len(images) > 0.7 * len(data.pixels)


def test_no_digit_has_more_images_than_there_are_words():
    counts = np.bincount(datasets.load_digits().target)
    assert counts.max() == digits_anomaly._MOST_IMAGES


def test_labels_are_the_digits():
    task = make()
    batch = sampled(task)
    inputs = batch.inputs[0]
    known = digits_by_image()
    labels = task.labels(batch._replace(inputs=inputs))
    assert labels == [str(known[image.tobytes()]) for image in inputs]
    unknown = batch._replace(inputs=np.zeros((6, 64), np.float32))
    assert task.labels(unknown) == ["?"] * 6


def test_images_are_the_inputs_in_gray():
    pixels = np.random.default_rng(0).integers(0, 17, (6, 64))
    example = tasks.Example(np.float32(pixels / 16), np.int32(0), np.float32(1))
    images = make().images(example)
    assert images.shape == (6, 8, 8) and images.dtype == np.uint8
    assert (abs(images - pixels.reshape(6, 8, 8) * 255 / 16) <= 0.5).all()


def test_text_is_refused():
    with pytest.raises(ValueError, match="whose inputs are images"):
        make().encode("7 7 7 3 7 7")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 2}, "^sequence_length must be an integer from 3"),
        ({"held_out_fraction": 0.0}, "leave 6 images of each digit to both parts"),
        ({"held_out_fraction": 0.99}, "leave 6 images of each digit to both parts"),
    ],
)
def test_impossible_sets_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
