"""Layouts of the published benchmarks of videos (docs/evaluation.md): an entry (row) and the Media
folder -> its video, its annotation, and the true masks, if any. benchmarks.py has the other
layouts and the list."""

from evaluation.masks import RunLengths
from tools.prepare.annotations import require
from tools.prepare.videos import belongs, has_position, tracked_video

POINTS_COLUMNS = "video_id two_fps_timestamps points masks label width height"
COUNT_COLUMNS = "video_id question label count clip_start clip_end"
TRACK_COLUMNS = "video clip exp fps points masks mask_id w h video_dataset"
MASKS_PER_SECOND = 2  # of Molmo2-VideoPoint


def point_video(row, media, **clip):
    name = row["video_id"]
    return media.video(f"{media.stem(name)}_2fps", name, **clip)


def timed_points(row, media):
    """Molmo2-VideoPoint. Every point has masks at several times. The wording of the question is the
    official one."""
    points = [{"t": t, "x": point["x"], "y": point["y"]}
              for t, point in zip(row["two_fps_timestamps"], row["points"], strict=True)]
    label = row["label"]
    annotation = {
        "type": "point", "style": "video_point_count", "label": label,
        "question": f'How many "{label}" are there in the video?', "coords": "pixel",
        "size": [row["width"], row["height"]], "points": points,
    }
    require(len(row["masks"]) == len(points), "masks that do not fit the points")
    masks = {}
    for k, of_point in enumerate(row["masks"]):
        for mask in of_point:
            masks[k, mask["frame_id"] / MASKS_PER_SECOND] = mask["rle"]
    return point_video(row, media), annotation, RunLengths(len(points), masks)


def counted_objects(row, media):
    """Molmo2-VideoCount: a question with a number, about a clip."""
    annotation = {"type": "count", "style": "video_count", "question": row["question"],
                  "label": row["label"], "count": row["count"]}
    video = point_video(row, media, start=row["clip_start"], end=row["clip_end"])
    return video, annotation, None


def tracked_objects(row, media):
    """Molmo2-VideoTrack. Points and masks are given for every frame of the clip, and one frame per
    second is scored, as in the official code."""
    step = int(row["fps"])
    paths = {path["object_id"]: path["points"] for path in row["points"]
             if belongs(path["object_id"], row)}
    points = []
    for k, object_id in enumerate(row["mask_id"]):
        for frame, place in enumerate(paths[object_id]):
            if frame % step == 0 and has_position(place):
                points.append({"t": frame / row["fps"], "id": k, "x": place[0], "y": place[1]})
    annotation = {"type": "track", "label": row["exp"], "coords": "pixel", "fps": 1,
                  "size": [row["w"], row["h"]], "points": points}
    objects = {k: n for n, k in enumerate(sorted({point["id"] for point in points}))}
    of_object = {found["object_id"]: found["masks"] for found in row["masks"]}
    masks = {}
    for k, n in objects.items():
        for frame, mask in enumerate(of_object[row["mask_id"][k]]):
            if frame % step == 0 and mask:
                masks[n, frame / row["fps"]] = mask
    return tracked_video(row, media), annotation, RunLengths(len(objects), masks)
