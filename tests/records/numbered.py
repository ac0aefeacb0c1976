"""Makes videos with ffmpeg. Every frame shows its number as 16 light or dark blocks."""

import subprocess

import imageio_ffmpeg
import numpy as np

from records import media

FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()
H264 = ("-c:v libx264 -preset veryfast -pix_fmt yuv420p -bf 3 "
        "-x264-params b-adapt=0:keyint=12")
MPEG4 = "-c:v mpeg4 -q:v 2 -bf 2 -g 12"


def ffmpeg(*args, stdin=b""):
    """Runs ffmpeg with these words, or strings of words -> its output."""
    words = []
    for arg in args:
        words += arg.split() if isinstance(arg, str) else [arg]
    child = subprocess.run([FFMPEG, "-v", "error", "-y", *words], input=stdin, capture_output=True)
    assert child.returncode == 0, child.stderr.decode()
    return child.stdout


def numbered_frame(n):
    """-> (48,64) uint8: two rows of eight blocks. A block is light if its bit of n is 1."""
    bits = n >> np.arange(16).reshape(2, 8) & 1
    return np.kron(bits, np.ones((24, 8))).astype(np.uint8) * 200 + 28


def number(frame):
    """-> the number that a frame shows."""
    assert frame.shape == (48, 64, 3)
    assert frame.dtype == np.uint8
    blocks = frame.reshape(2, 24, 8, 24).mean((1, 3)) > 128
    return int((blocks << np.arange(16).reshape(2, 8)).sum())


def make_video(path, encoder=H264, n=30, rate=10):
    """Writes a video of n numbered frames, `rate` per second -> its path."""
    frames = b"".join(numbered_frame(i).tobytes() for i in range(n))
    raw = f"-f rawvideo -pix_fmt gray -s 64x48 -r {rate} -i -"
    ffmpeg(raw, encoder, path, stdin=frames)
    return path


def numbers(video, times):
    """-> the numbers of the frames that are displayed at these times in seconds."""
    return [number(frame) for frame in media.frames(video, times)]
