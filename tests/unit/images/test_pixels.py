"""Images as pixels: files, Pillow images, arrays, and what a processor made of them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image

from regard.errors import ArgumentError, ArgumentTypeError
from regard.images import load_pixels, undo_normalisation
from regard.images.pixels import shrink
from tests.helpers.images import draw_image


def test_files_pillow_images_and_arrays_are_the_same_pixels(tmp_path):
    pixels = draw_image()
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    forms = [
        path,
        str(path),
        Image.open(path),
        pixels,
        pixels / 255,
        pixels.transpose(2, 0, 1),
        pixels.astype(np.int64),
    ]
    forms.append(np.dstack([pixels, np.full(pixels.shape[:2], 128, np.uint8)]))
    for form in forms:
        np.testing.assert_array_equal(load_pixels(form), pixels)
    grey = pixels[..., 0]
    np.testing.assert_array_equal(load_pixels(grey), np.stack([grey] * 3, -1))
    np.testing.assert_array_equal(load_pixels(grey > 100)[..., 1], np.where(grey > 100, 255, 0))


def test_the_orientation_of_a_camera_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.fromarray(draw_image(8, 16)).save(tmp_path / "turned.png", exif=exif)
    assert load_pixels(tmp_path / "turned.png").shape == (16, 8, 3)


def test_a_tensor_is_read():
    torch = pytest.importorskip("torch")
    pixels = draw_image()
    tensor = torch.tensor(pixels).permute(2, 0, 1).to(torch.bfloat16).div(255).requires_grad_()
    np.testing.assert_allclose(load_pixels(tensor), pixels, atol=1)


def test_the_picture_that_clip_saw_is_the_middle_of_the_image():
    transformers = pytest.importorskip("transformers")
    pixels = draw_image(32, 64)
    processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    values = processor(pixels, return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(undo_normalisation(values, processor), pixels[:, 16:48], atol=1)
    with pytest.raises(ArgumentError, match="undo_normalisation"):
        load_pixels(values)


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        ("no-such.png", ArgumentError, "'no-such.png', which cannot be read .No such file"),
        (__file__, ArgumentError, r"'test_pixels.py', which cannot be read .UnidentifiedImageError"),
        (7, ArgumentTypeError, "image as int 7"),
        (np.zeros((2, 3, 8, 8)), ArgumentError, "Pass one image"),
        (np.zeros((5, 7, 2)), ArgumentError, "image as an array"),
        (np.zeros((0, 4, 3)), ArgumentError, "image as an array"),
        (np.full((4, 4, 3), 1.5), ArgumentError, "numbers from 1.5 to 1.5"),
        (np.full((4, 4, 3), np.nan), ArgumentError, "numbers from nan to nan"),
        (np.full((4, 4, 3), 256), ArgumentError, "numbers from 256 to 256"),
    ],
)
def test_other_images_are_refused(image, error, message):
    with pytest.raises(error, match=message):
        load_pixels(image)


def test_normalisation_is_not_guessed():
    with pytest.raises(ArgumentError, match="image_mean=None"):
        undo_normalisation(np.zeros((3, 4, 4)), object())


def test_a_large_image_is_shrunk_by_means():
    pixels = draw_image(30, 50)
    small = shrink(pixels, 25)
    assert small.shape == (15, 25, 3)
    np.testing.assert_array_equal(small, np.round(pixels.reshape(15, 2, 25, 2, 3).mean((1, 3))))
    assert shrink(pixels, 50) is pixels
    assert shrink(draw_image(3, 400), 40).shape == (1, 40, 3)
