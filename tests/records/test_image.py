"""Images of every mode become 8-bit RGB as displayed, or their record is skipped."""

import numpy as np
import pytest
from PIL import Image

from records.media import EXIF_ORIENTATION, Unreadable, image_size, read_image
from records.reader import Records
from tests.records.samples import CAPTION, image, write

RAMP = np.arange(256, dtype=np.uint16)[None].repeat(4, 0)  # 256 x 4 pixels, with levels 0 to 255


@pytest.mark.parametrize("mode", ["P", "L", "LA", "RGBA", "CMYK", "I;16", "1"])
def test_images_of_every_mode_become_rgb(tmp_path, mode):
    name = "a.tif" if mode == "CMYK" else "a.png"
    Image.new(mode, (40, 30)).save(tmp_path / name)
    records = Records(write(tmp_path / "r.jsonl", image(CAPTION, image=name)))
    (pixels,) = records.images(records[0])
    assert pixels.shape == (30, 40, 3)
    assert pixels.dtype == np.uint8


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_16_bits_are_scaled_and_not_cut_off(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(RAMP * 257).save(path)
    with Image.open(path) as opened:
        assert opened.mode.startswith("I")
    assert np.array_equal(read_image(path), RAMP[..., None].repeat(3, 2))


@pytest.mark.parametrize("suffix", ["png", "tif", "jpg"])
def test_an_image_that_exif_turns_is_read_as_displayed(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    stored = np.kron(np.array([[0, 250], [90, 170]], np.uint8), np.ones((16, 24), np.uint8))
    options = {"compression": "tiff_lzw"} if suffix == "tif" else {}
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6                   # turned by 90 degrees
    Image.fromarray(stored).save(path, exif=exif, **options)
    assert image_size(path) == (32, 48)
    upright = np.rot90(stored, -1)[..., None].repeat(3, 2)       # clockwise
    assert np.abs(read_image(path).astype(int) - upright).max() < 5


def test_an_orientation_that_exif_does_not_define_turns_nothing(tmp_path):
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 9
    Image.fromarray(RAMP.astype(np.uint8)).save(tmp_path / "a.jpg", exif=exif)
    assert image_size(tmp_path / "a.jpg") == (256, 4)
    assert read_image(tmp_path / "a.jpg").shape == (4, 256, 3)


def test_pixels_of_another_size_than_the_header_says_cost_the_image(tmp_path, monkeypatch):
    """Pillow 13 decodes some TIFF files with wrong sizes. Every reader of images detects this."""
    Image.fromarray(RAMP).save(tmp_path / "a.png")
    monkeypatch.setattr("vision.to_array", lambda image: np.zeros((256, 4, 3), np.uint8))
    with pytest.raises(Unreadable, match=r"^size differs: .*a.png is not as large as its header"):
        read_image(tmp_path / "a.png")


def test_a_png_is_turned_by_exif_behind_its_pixels(tmp_path):
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    Image.fromarray(RAMP).save(tmp_path / "front.png", exif=exif)
    content = (tmp_path / "front.png").read_bytes()
    at = content.index(b"eXIf") - 4
    chunk = content[at : at + 12 + int.from_bytes(content[at : at + 4], "big")]
    end = content.index(b"IEND") - 4
    (tmp_path / "a.png").write_bytes(content[:at] + content[at + len(chunk) : end] + chunk
                                     + content[end:])
    height, width, _ = read_image(tmp_path / "a.png").shape
    assert image_size(tmp_path / "a.png") == (width, height) == (4, 256)


@pytest.mark.parametrize(("pixels", "tags"), [
    (RAMP.astype(np.int32) * 257, {}), (RAMP.astype(np.float32) / 255, {}),
    (RAMP, {339: 2})])                           # the tag SampleFormat: signed 16 bits
def test_signed_and_32_bit_pixels_are_refused_and_do_not_become_black(tmp_path, pixels, tags):
    """Their range is unknown. For example, floats from 0 to 1 would all be rounded to 0."""
    Image.fromarray(pixels).save(tmp_path / "a.tif", tiffinfo=tags)
    assert image_size(tmp_path / "a.tif") == (256, 4)
    words = r"^damaged image: .* have no known range; save 8 or unsigned 16 bits"
    with pytest.raises(Unreadable, match=words):
        read_image(tmp_path / "a.tif")


@pytest.mark.parametrize(("start", "words"), [
    (b"\0\0\0\x18ftypheic", "this HEIC or AVIF file; convert it, for example with: heif-convert"),
    (b"\0\0\0\x1cftypavif", "this HEIC or AVIF file"),
    (b"\0\0\0\x0cJXL \r\n", "this JPEG XL file; .* djxl a.jxl a.png"),
    (b"\xff\x0a\xfa", "this JPEG XL file"),
    (b"<svg xmlns=", "this SVG file; .* rsvg-convert a.svg"),
    (b'<?xml version="1.0"?>\n<!-- drawn -->\n<svg xmlns=', "this SVG file"),
    (b"v/1\x01\x02", "this OpenEXR file; .* magick a.exr"),
    (b"#?RADIANCE\n", "this Radiance HDR file; .* magick a.hdr"),
])
def test_a_format_that_pillow_does_not_read_is_named_by_the_content_of_the_file(tmp_path, start,
                                                                                words):
    path = tmp_path / "a.jpg"
    path.write_bytes(start + bytes(99))
    with pytest.raises(Unreadable, match=f"^unknown format: .*Pillow cannot read {words}") as error:
        image_size(path)
    assert str(error.value).count(str(path)) == 1


@pytest.mark.parametrize("start", [
    b"\0\0\0\x18ftypisom", b"\0\0\0\x14ftypqt  ", b"\x1aE\xdf\xa3", b"RIFF\0\0\0\0AVI LIST"])
def test_a_video_in_the_place_of_an_image_is_called_a_video(tmp_path, start):
    (tmp_path / "a.png").write_bytes(start + bytes(99))
    with pytest.raises(Unreadable, match=r"this is a video; give it as a video, not as an image"):
        image_size(tmp_path / "a.png")


def test_a_page_in_the_place_of_an_image_is_no_unknown_format(tmp_path):
    path = tmp_path / "a.svg"
    for text in ("<!DOCTYPE html><svg>", "<?xml version='1.0'?><Error>", ""):
        path.write_text(text)
        with pytest.raises(Unreadable) as error:
            image_size(path)
        assert str(error.value) == f"damaged image: {path}: Pillow finds no image in this file"


def test_whatever_a_decoder_raises_costs_the_image(tmp_path, monkeypatch):
    (tmp_path / "page.png").write_text("<html>404</html>")
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    for name, kind in (("page.png", "damaged image"), ("gone.png", "missing file")):
        with pytest.raises(Unreadable, match=f"^{kind}: {tmp_path / name}"):
            image_size(tmp_path / name)
    for limit in (1000, 500):            # Pillow warns, and raises an error from twice the limit on
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(Unreadable, match=r"^too large: .*more than 89,478,485 pixels; make it"):
            image_size(tmp_path / "a.png")
    monkeypatch.undo()
    for error in (KeyError("x"), SyntaxError("x"), ZeroDivisionError(), MemoryError()):
        def fail(image, error=error):
            raise error

        monkeypatch.setattr("vision.to_array", fail)
        with pytest.raises(Unreadable, match=r"^damaged image: .*a.png: \S"):
            read_image(tmp_path / "a.png")
