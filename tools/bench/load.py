"""Times the steps from a video file to the input of the model, compared with decoding alone.

    python -m tools.bench load --seconds 3 --rounds 1 --frames 16

The frames are spread over the video. times_decode is the time divided by the time in which
ffmpeg, with one thread, decodes the whole file once. No reader of the whole video can be
faster. "prepared" means the same frames, as files that `tools.prepare frames` writes. MB is
the size on the disk.
"""

import math
import statistics
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import imageio_ffmpeg
import torch

import vision
from records import media
from records.video import probe
from records.visual import frame_crops
from tools.bench.measure import clock, run_rounds, spread
from tools.command import positive, print_table
from tools.prepare.frames import save

FFMPEG = "ffmpeg, decoding alone"


def run_ffmpeg(*arguments):
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-loglevel", "error", *arguments]
    subprocess.run(command, check=True)


def make_video(path, seconds):
    """Writes a video of a test pattern that moves as a whole and in parts, with noise. It is H.264
    at 30 frames per second and 4 Mbit/s, with a key frame every two seconds."""
    pattern = f"testsrc2=s=1280x720:r=30:d={seconds},scroll=h=0.002:v=0.001,noise=alls=10:allf=t"
    run_ffmpeg("-f", "lavfi", "-i", pattern, "-c:v", "libx264", "-preset", "veryfast", "-b:v", "4M",
               "-g", "60", "-pix_fmt", "yuv420p", str(path))


def choose_times(video, frames):
    """-> {case: times in seconds of the frames to read}. There are not more times than frames in
    the video, and no time is later than its last frame."""
    cases = {}
    last = float(video.times[-1])
    for n in frames:
        n = min(n, len(video.times))
        times = vision.frame_times(video.duration, n, fps=math.inf)
        cases[f"{n} frames"] = [min(t, last) for t in times]
    return cases


def time_decoding(path):
    """-> seconds in which ffmpeg decodes the whole video, without any output."""
    start = time.perf_counter()
    run_ffmpeg("-threads", "1", "-i", str(path), "-map", "0:V:0", "-fps_mode", "passthrough",
               "-f", "null", "-")
    return time.perf_counter() - start


def time_loading(open_video, times, device):
    """-> seconds to open a video and turn frames at these times into model input on a device."""
    start = time.perf_counter()
    crops = frame_crops(media.frames(open_video(), times), len(times), vision.RELEASED)
    torch.from_numpy(crops).to(device)
    return clock(device) - start


def summarise(rounds, case, n_frames, paths):
    """[{case: seconds} for each round] -> the table row of one case. paths: the files it reads."""
    return {
        "seconds": statistics.median(found[case] for found in rounds),
        "times_decode": spread([found[case] / found[FFMPEG] for found in rounds]),
        "frames": n_frames,
        "MB": sum(path.stat().st_size for path in paths) / 1e6,
    }


def compare(path, video, args):
    """-> {case: its table row}: decoding alone, frames of the video, the same frames prepared."""
    runs = {FFMPEG: partial(time_decoding, path)}
    read = {FFMPEG: (len(video.times), [path])}  # {case: (number of frames, files)}
    for k, (case, times) in enumerate(choose_times(video, args.frames).items()):
        folder = path.parent / str(k)
        save(media.frames(video, times), folder, vision.RELEASED.crop, "jpg")
        images = sorted(folder.iterdir())
        prepared = partial(media.FrameFolder, images, 1, len(times))
        runs[case] = partial(time_loading, partial(probe, path), times, args.device)
        runs[f"{case}, prepared"] = partial(time_loading, prepared, prepared().times, args.device)
        read |= {case: (len(times), [path]), f"{case}, prepared": (len(times), images)}
    rounds = run_rounds(runs, args.rounds)
    return {case: summarise(rounds, case, *read[case]) for case in runs}


def add_arguments(parser):
    add = parser.add_argument
    add("--seconds", type=positive, default=180, help="seconds of the test video")
    add("--frames", type=positive, nargs="+", default=[384, 128], help="numbers of frames to read")
    add("--rounds", type=positive, default=3, help="measurements of each case")


def run(args):
    """Prints the table -> {"video", "results"}."""
    torch.set_num_threads(1)  # as in a worker of the training loader
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "made.mp4")
        make_video(path, args.seconds)
        video = probe(path)
        results = compare(path, video, args)
    print_table("loading", results)
    return {"video": {"seconds": video.duration, "frames": len(video.times)}, "results": results}
