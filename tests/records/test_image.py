"""Images of every mode become 8-bit RGB as displayed, or are refused."""

import numpy as np
import pytest
from PIL import Image

from records.image import EXIF_ORIENTATION
from records.media import Unreadable, header, read_image
from records.reader import Records
from tests.records.samples import CAPTION, image, write

RAMP = np.arange(256, dtype=np.uint16)[None].repeat(4, 0)        # 256 x 4, levels 0 to 255


def turned_by_90_degrees():
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    return exif


@pytest.mark.parametrize("mode", ["P", "L", "LA", "RGBA", "CMYK", "I;16", "1"])
def test_images_of_every_mode_become_rgb(tmp_path, mode):
    name = "a.tif" if mode == "CMYK" else "a.png"
    Image.new(mode, (40, 30)).save(tmp_path / name)
    records = Records(write(tmp_path / "r.jsonl", image(CAPTION, image=name)))
    (pixels,) = records.images(records[0])
    assert pixels.shape == (30, 40, 3)
    assert pixels.dtype == np.uint8


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bits_are_scaled_and_not_cut_off(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(RAMP * 257).save(path)
    with Image.open(path) as opened:
        assert opened.mode.startswith("I")
    assert np.array_equal(read_image(path), RAMP[..., None].repeat(3, 2))


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_a_16_bit_image_keeps_its_rotation(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(RAMP * 257).save(path, exif=turned_by_90_degrees())
    upright = np.rot90(RAMP, -1)                                 # clockwise
    assert header(path) == (4, 256)
    assert np.array_equal(read_image(path), upright[..., None].repeat(3, 2))


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_turned_tiff_is_read_as_displayed(tmp_path, mode, compression):
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 255, (20, 30) if mode == "L" else (20, 30, 3), np.uint8)
    path = tmp_path / "a.tif"
    Image.fromarray(stored).save(path, exif=turned_by_90_degrees(), compression=compression)
    upright = Image.fromarray(np.rot90(stored, -1)).convert("RGB")
    assert header(path) == (20, 30)
    assert np.array_equal(read_image(path), np.array(upright))


def test_a_photo_that_exif_turns_is_read_as_displayed(tmp_path):
    Image.new("RGB", (40, 30)).save(tmp_path / "a.jpg", exif=turned_by_90_degrees())
    records = Records(write(tmp_path / "r.jsonl", image(CAPTION, image="a.jpg")))
    assert records.image_sizes(records[0]) == [(30, 40)]
    assert records.images(records[0])[0].shape == (40, 30, 3)


@pytest.mark.parametrize("pixels", [RAMP.astype(np.int32) * 257, RAMP.astype(np.float32) / 255])
def test_32_bit_pixels_are_refused_and_do_not_become_black(tmp_path, pixels):
    """Their range is unknown: of floats from 0 to 1, all would round to 0."""
    Image.fromarray(pixels).save(tmp_path / "a.tif")
    assert header(tmp_path / "a.tif") == (256, 4)
    with pytest.raises(Unreadable, match=r"^S21 cannot decode .* have no known range"):
        read_image(tmp_path / "a.tif")
