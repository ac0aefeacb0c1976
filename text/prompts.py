"""What the user asks and what the model shall answer: an annotation as turns of a chat (paper: data; spec 4.3, 5.2, 5.3).

in    an annotation of a native record, the record, the sizes of its images or its video (formats.md 7)
out   [(question, answer), ..] for text.chat; nothing is read and nothing remembered

    stage 1        long_caption 65:                     pointing: cat           text_sft 7: Name a prime.
    stages 2, 3    Describe this image in detail.       Where is the cat?       vqa2: What is it?

A *style* is the name of a family of prompts. In stage 1 it opens every prompt; later what people ask ("demo" styles, multiple
choice) is said plainly and only benchmark-like styles are named. Every random choice is a draw from the rng handed in, a
numpy Generator or RandomState; rng None asks instead of teaching: no draws, the first of all wordings, the form used in evaluation.
Visual tokens always lead, so prompts hold text alone. Wordings are our own; styles are named as in the released models where the spec
has a name (it has none for object_caption, count, count_point and the last two of several images).
"""

import re
import string
from itertools import zip_longest

from text.points import format_points, format_tracks, unit

CAPTIONS = ("caption", "short_caption", "transcript", "clip", "frame", "object")
POINTS, TRACKS = ("point", "point_count", "count_point", "count"), ("per_frame", "start_end", "from_point")
# task -> its style on an image, on several images, on a video, where the annotation names none; TASK is the way back
IMAGE = {"caption": "long_caption", "object": "object_caption", "point": "pointing", "point_count": "point_count",
         "count_point": "count_point", "count": "count", "qa": "user_qa"}
IMAGES = IMAGE | {"point": "multi_image_pointing", "point_count": "multi_image_point_then_count",
                  "count_point": "multi_image_count_then_point", "count": "multi_image_count"}
VIDEO = {"caption": "video_long_caption", "object": "video_object_caption", "clip": "video_clip_caption_start_end",
         "frame": "video_frame_caption_timestamp", "qa": "user_qa", "per_frame": "video_point_track_per_frame",
         "start_end": "video_point_ground_start_end", "from_point": "video_single_point_track_per_frame",
         **{task: f"video_{task}" for task in POINTS}}
STYLES = {"image": IMAGE, "images": IMAGES, "video": VIDEO, "text": {"qa": "text_sft"}}
TASK = {style: task for styles in STYLES.values() for task, style in styles.items()}
TASK |= {"short_caption": "short_caption", "video_short_caption": "short_caption", "video_transcript": "transcript",
         "cosyn_point": "point", "video_short_answer": "short_answer"}
ALIAS = {"eval_short_answer": "vqa2", "eval_multiple_choice": "a_okvqa_mc", "video_eval_short_answer": "video_short_answer",
         "video_eval_multiple_choice": "video_multiple_choice"}

# styles without their name in front from stage 2 on (spec 4.3), and those of multiple choice
DEMO = re.compile(r"pointing|point_count|count_point|count|cosyn_point|user_qa|correction_qa|text_sft|(video_)?(long|short)_caption"
                  r"|video_(transcript|(clip|frame)_caption.*|point|point_count|count|count_point|point_track_per_frame)"
                  r"|multi_image_(pointing|point_then_count|count_then_point|count)")
CHOICE = re.compile(r"(\w+_mc|(\w+_)?multiple_choice\w*|ai2_diagram\w*|science_qa\w*)")

# Of a picture they say "this image" or "the image" (or picture, photo) and never make it the subject: see `wording`.
TEMPLATES = {
    "caption": ("Describe this image in detail.", "Write a long caption for this image.", "Tell me everything you see in this picture.",
                "Give a thorough description of the photo.", "What can be seen in this image? Leave nothing out.",
                "Explain this picture to someone who cannot see it.", "I need a complete account of the image."),
    "short_caption": ("Describe this image briefly.", "Write a short caption for this image.", "Sum up the picture in a sentence.",
                      "In a few words, what can be seen in this photo?", "A short description of the image, please."),
    "transcript": ("Write down what is said in this image.", "Give the spoken words of the image.", "Transcribe the speech in this image."),
    "clip": ("Describe {what} from {start} to {end}.", "Between {start} and {end}: write a caption of {what}.",
             "Look at the image from {start} until {end} and describe {what}."),
    "frame": ("Describe {what} at {at}.", "At {at}: write a caption of {what}.", "Pause the image at {at} and describe {what}."),
    "object": ("Describe {what} in this image.", "Write a caption of {what} alone.", "What can you tell me about {what} in the picture?"),
    "short_answer": ("{question}", "{question} Answer in a few words.", "{question} Keep it short.", "Answer briefly: {question}",
                     "{question} A word or a phrase is enough."),
    "point": ("Point to {label}.", "Where is the {label}?", "Show me every {label}.", "Find {label} in the image.",
              "Mark each {label} with a point.", "I am looking for {label} in this picture. Point it out.", "{label}: where?",
              "Put a point on each {label} that you can see."),
    "point_count": ("How many {label} are there? Point to them.", "Count the {label} by pointing.", "Point to each {label} and count.",
                    "Point at every {label} in the image, then give their number.", "Find each {label} and tell me the total.",
                    "With a point on each, how many {label} can you see in this photo?"),
    "count_point": ("Say how many {label} there are, then point to them.", "Give the number of {label} first and their places after it.",
                    "First the count of {label}, then a point on each.", "How many {label}? The number first, then show me."),
    "count": ("How many {label} are there? Answer with a number.", "Only the number: how many {label}?",
              "Count the {label} in the image, no points.", "State the number of {label} as a figure."),
    "per_frame": ("Track {label}{rate}.", "Follow {label} through the image{rate}.", "Point to {label} in every frame{rate}.",
                  "Mark where {label} can be seen over time{rate}.", "Give the path of {label} through this image{rate}."),
    "start_end": ("Point to {label} where they first and last appear.", "Mark the first and the last sight of {label} in the image.",
                  "When and where does {label} come into view, and when does it leave? Point.",
                  "Give a point at the start and at the end of the time {label} can be seen."),
    "from_point": ("Track {tag}{rate}.", "Start from {tag} and follow it{rate}.", "Go on tracking the object at {tag}{rate}.",
                   "{tag} is where it begins. Say where it goes{rate}.", "Follow what is marked here through the image{rate}: {tag}"),
}
RATES = (" at {fps} fps", " with {fps} frames per second", " ({fps} fps)", ", {fps} points per second")
AMONG = ("{ask} Look at {images}.", "In {images}: {ask}", "{ask} Consider {images}.", "For {images}. {ask}")
REASONS = "Provide reasoning steps and then give the short answer."      # the released models' own, as is the sentence below
ONE_OPTION = "Only return the correct answer option."
INSTRUCTIONS = {True: ("Answer with the label alone.", "Just the label, please.", "Do not repeat the text: the label will do."),
                False: ("Pick from the options.", "Choose what is right.", "Answer in the words of the options.", "Select what fits best.")}
UPPER, LOWER, NUMBERS = string.ascii_uppercase, string.ascii_lowercase, [str(i + 1) for i in range(26)]
ROMAN = [tens + one for tens in ("", "x", "xx") for one in ("i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x")]
MARKERS = [(form, names) for names in (UPPER, NUMBERS) for form in ("{}.", "{})", "({})", "{}:")]
UNUSUAL = [("{}.", LOWER), ("{})", ROMAN), ("[{}]", UPPER), ("<{}>", NUMBERS), ("Option {}:", UPPER), ("{} -", LOWER), ("#{}", NUMBERS)]
COUNTING = re.compile(r"\b(how many|count|counts|counting|the (total )?(number|amount) of)\b", re.IGNORECASE)
NO_POINTS = ("Do not point. ", "Answer in words, without points: ", "No pointing, please. ", "Just tell me, with no points: ")


def chance(rng, p):
    return rng is not None and rng.random() < p


def pick(rng, options):
    """One of a sequence, the first when asking. Only methods that Generator and RandomState share are used here."""
    return options[0 if rng is None else int(rng.choice(len(options)))]


def medium(record):
    """image | images (two or more) | video | text"""
    if "video" in record:
        return "video"
    n = len(record["images"]) if "images" in record else "image" in record
    return "images" if n > 1 else "image" if n else "text"


def style_of(a, record, rng):
    """The style that the annotation names, by its name in training (spec 4.3), or that of its type on such a record."""
    if "style" in a:
        return ALIAS.get(a["style"], a["style"])
    task = {"caption": part_of(a) or "caption", "track": a.get("mode", "per_frame")}.get(a["type"], a["type"])
    if task == "point":                      # a question of the user's own cannot tell which answer is wanted: plain points
        task = a.get("mode") or ("point" if "question" in a else pick(rng, ("point", "point_count")))
    return STYLES[medium(record)][task]


def wording(task, record, rng):
    """A template of a task in the words of the record: "this image" becomes "this video", or "these images" of several."""
    text, kind = pick(rng, TEMPLATES[task]), medium(record)
    if kind == "video":
        text = re.sub("image|picture|photo", "video", text)
    elif kind == "images":
        text = re.sub("(the|this) (image|picture|photo)", r"\1 \2s", text).replace("this ", "these ")
    return text


def prompt(style, text, config, rng=None, length=None, bare=False):
    """The style in front of the user's words, where it belongs (spec 4.3). text may be "": the style is all there is.

    Stage 1: `{style} {n}: {text}`, n ~ a fifteenth of the answer's characters (length), noisy, left out in 10 %; length None,
    for pointing and counting, has no n. Later `{style}: {text}`, or the text alone for demo styles and if bare.
    """
    hint = ""
    if not config.prefix_all:
        if text and (bare or DEMO.fullmatch(style)):
            return text
    elif length is not None and rng is None:
        hint = f" {config.length_hint}" if config.length_hint else ""
    elif length is not None and rng.random() < 0.9:
        hint = f" {max(length + int(rng.normal(0, 25)), 0) // 15}"
    return f"{style}{hint}:" + (f" {text}" if text else "")


def turns_of(a, record, sizes, config, rng, times=None):
    """One annotation -> [(question, answer), ..], a pair per turn; rng None: the form of evaluation.

    sizes: (width, height) in pixels of every image, or of the video; times: seconds, from the start of the clip, of the
    frames that the model is shown, which tracks are cut down to (None: all that are annotated).
    """
    if a["type"] == "text":
        return [(a.get("prompt", ""), a["text"])]
    if a["type"] == "qa":
        return qa_turns(a, record, config, rng)
    if a["type"] == "caption":
        return [caption_turn(a, record, config, rng)]
    sizes = scales(record, sizes)
    if a["type"] == "track":
        return [track_turn(a, record, sizes, config, rng, times)]
    return [point_turn(a, record, sizes, config, rng)]


def scales(record, sizes):
    """[(width, height), ..] that points in pixels are on: what the record declares, else the file's own sizes (formats.md 7.3)."""
    files = record["images"] if "images" in record else [record.get("image", record.get("video"))]
    declared = [(f["width"], f["height"]) if isinstance(f, dict) and "width" in f else None for f in files]
    return [mine or size for mine, size in zip_longest(declared, sizes)]


def question_of(a, record, config, sizes=()):
    """What the user says first to get an annotation's answer: no randomness, the length hint of config (spec 4.3). sizes, as in
    turns_of, matter only where a track starts from a point in pixels on a scale that the record does not declare."""
    return turns_of({**a, "points": []} if "points" in a else a, record, sizes, config, None)[0][0]


def since_start(t, record):
    """A time on the clock of the file -> seconds from the start of the clip."""
    return float(t) - (record["video"].get("start", 0) if isinstance(record["video"], dict) else 0)


def seconds(t, record):
    """... to a tenth, as all text has them (spec 5.1)."""
    return max(0.0, round(since_start(t, record), 1))


def clock(t):
    """75.5 -> "00:01:15.5" """
    tenths = round(t * 10)
    return f"{tenths // 36000:02d}:{tenths // 600 % 60:02d}:{tenths % 600 / 10:04.1f}"


def part_of(a):
    """Is a caption of a clip, of a frame, or of an object? None: of everything."""
    return "clip" if "start" in a else "frame" if "at" in a else "object" if "object" in a else None


def caption_turn(a, record, config, rng):
    style, part = style_of(a, record, rng), part_of(a)
    when = {key: seconds(a[key], record) for key in ("start", "end", "at") if key in a}
    task, text = part or TASK.get(style), ""
    if config.prefix_all:
        text = ", ".join(filter(None, (a.get("object"), " to ".join(map(str, when.values())))))
    elif task in CAPTIONS:
        say = clock if when and chance(rng, 0.5) else str
        what = a.get("object", "what happens" if part == "clip" else "what is to be seen")
        text = wording(task, record, rng).format(what=what, **{key: say(t) for key, t in when.items()})
    return prompt(style, text, config, rng, len(a["text"])), a["text"]


def in_words(question):
    """A question, given as a string or in parts, as text: {"image": k} is called "Image k+1", as the text before its visual tokens
    calls it (spec 2.4); {"video": 0} is dropped where it opens the question, since the video does, and else is "the video"."""
    if isinstance(question, str):
        return question
    # NUL, which no record may hold, stands around a name; where it borders on a word it becomes a space
    parts = [p if isinstance(p, str) else "\0the video\0" if "video" in p else f"\0Image {p['image'] + 1}\0" for p in question]
    text = re.sub(r"^\0the video\0\s*", "", "".join(parts))
    return re.sub(r"(?<=\w)\0+(?=\w)", " ", text).replace("\0", "")


def choices(question, turn, free, rng):
    """A question with options -> (question, answer). The form of evaluation, or (free) in nine of ten a layout drawn at random:
    labels 80 %, answered by the label alone 25 %, in one line 10 %, an instruction 50 %, odd markers 20 % (spec 4.3)."""
    order = range(len(turn["options"])) if rng is None or not turn.get("shuffle_options") else rng.permutation(len(turn["options"]))
    right = turn["answer_idx"] if isinstance(turn["answer_idx"], list) else [turn["answer_idx"]]
    right = [place for place, i in enumerate(order) if i in right]
    options = [turn["options"][i] for i in order]
    blank = any(not options[i].strip() for i in right)                    # without a label there would be nothing to say
    labelled = turn.get("letters", True) or blank
    if not free or chance(rng, 0.1):
        lines = [f"{UPPER[i]}. {o}".rstrip() for i, o in enumerate(options)] if labelled else options
        return "\n".join([question, ONE_OPTION, *lines]), "\n".join(lines[i] for i in right)

    labelled = labelled and (blank or chance(rng, 0.8))
    short = labelled and chance(rng, 0.25)
    form, names = pick(rng, UNUSUAL if chance(rng, 0.2) else MARKERS)
    shown = [f"{form.format(names[i])} {o}".rstrip() for i, o in enumerate(options)] if labelled else options
    answer = ", ".join(names[i] for i in right) if short else "\n".join(shown[i] for i in right)
    inline = chance(rng, 0.1)
    parts = [pick(rng, (" / ", "; ", " | ")).join(shown) if inline else "\n".join(shown)]
    if chance(rng, 0.5):
        parts.insert(0 if inline else int(rng.choice(2)), pick(rng, INSTRUCTIONS[short]))
    return (" " if inline else "\n").join([question, *parts]), answer


def qa_turn(turn, style, record, config, rng):
    """(question, answer) of one turn, without the style in front: options, several people's answers, an explanation."""
    question, free = in_words(turn["question"]), rng is not None and not config.prefix_all
    if style.endswith("_exp"):
        question = f"{question} {REASONS}"
    if "options" in turn:
        question, answer = choices(question, turn, free, rng)
    else:
        answers = turn["answers"] if "answers" in turn else [turn["answer"]]
        counts = {text: answers.count(text) for text in answers}
        answer = pick(rng, [text for text, n in counts.items() if n == max(counts.values())])
        if free and style in ("user_qa", "correction_qa") and medium(record) in ("image", "images") and COUNTING.search(question):
            question = pick(rng, NO_POINTS) + question                    # else it would look like a request to count by pointing
        elif free and TASK.get(style) == "short_answer":
            question = wording("short_answer", record, rng).format(question=question)
    return question, f"{turn['explanation']} Answer: {answer}" if "explanation" in turn else answer


def qa_turns(a, record, config, rng):
    """The style goes in front of the first question; its number in stage 1 counts the last answer."""
    style, given = style_of(a, record, rng), a.get("turns", [a])
    turns = [qa_turn(turn, style, record, config, rng) for turn in given]
    question = f"System: {a['system']}\n{turns[0][0]}" if "system" in a else turns[0][0]
    bare = "options" in given[0] or bool(CHOICE.fullmatch(style))
    return [(prompt(style, question, config, rng, len(turns[-1][1]), bare), turns[0][1]), *turns[1:]]


def point_turn(a, record, sizes, config, rng):
    """A point or count annotation. Of several images, half the prompts mean all, the others name some, and only points on
    these are answered (spec 5.2)."""
    style, kind = style_of(a, record, rng), medium(record)
    task = TASK.get(style) if TASK.get(style) in POINTS else None
    mode = a.get("mode") or task or "point"
    label = a["question"] if "label" not in a else a["label"] if kind == "video" else a["label"].lower()
    text, shown = a.get("question", label), range(len(sizes))
    if task and not config.prefix_all and "question" not in a:
        text = wording("count" if a["type"] == "count" else mode, record, rng).format(label=label)
        if kind == "images" and a["type"] == "point":
            whole = not chance(rng, 0.5)
            if not whole:
                shown = sorted(int(k) for k in rng.permutation(len(sizes))[: 1 + int(rng.choice(len(sizes)))])
            if not whole or not chance(rng, 0.5):                         # half of those that mean all images do not say so
                images = "all images" if whole else ", ".join(f"image_{k + 1}" for k in shown)
                text = pick(rng, AMONG).format(ask=text, images=images)
    question = prompt(style, text, config, rng)
    if a["type"] == "count":
        return question, str(a["count"]) if a["count"] else "There are none."
    groups = {}
    for p in a["points"]:
        k = p.get("image", 0)
        if k in shown:
            groups.setdefault(seconds(p["t"], record) if kind == "video" else k + 1, []).append(unit(p, a, sizes[k]))
    return question, format_points(sorted(groups.items()), label, mode, config.separator)


def track_turn(a, record, sizes, config, rng, times):
    """A track annotation (spec 5.3). Where it starts from a point, that is the query, in 20 % another visible point of the object
    but its last. Annotated more often than twice a second, it is asked for at 2 fps, or at 1 if 2 do not divide its rate."""
    style = style_of(a, record, rng)
    task = TASK.get(style) if TASK.get(style) in TRACKS else None
    mode, label, query, text = track_mode(a, record), a["label"], None, a.get("question", a["label"])
    if mode == "from_point":
        query = a["query"]
        seen = [p for p in visible(a) if p["id"] == query["id"]]
        if chance(rng, 0.2) and len(seen) > 1:
            query = pick(rng, seen[:-1])
        tag = format_points([(seconds(query["t"], record), [unit(query, a, sizes[0])])], label, separator=config.separator)
        text = f"{a['question']} {tag}" if "question" in a else tag
    rate = track_rate(a)
    if task and not config.prefix_all and "question" not in a:
        said = rate == 1 or (rate == 2 and not chance(rng, 0.5))
        suffix = pick(rng, RATES).format(fps=rate) if said else ""
        text = wording(mode, record, rng).format(label=label, rate=suffix, tag=tag if query else "")
    question = prompt(style, text, config, rng)
    if not a["points"]:
        return question, "There are none."
    frames = track_frames(a, record, sizes[0], times, query)
    return question, format_tracks(frames.items(), label, config.separator) or "No tracks available."


def track_mode(a, record):
    """per_frame | start_end | from_point: as the annotation says, or its style"""
    task = TASK.get(style_of(a, record, None))
    return a.get("mode") or (task if task in TRACKS else "per_frame")


def track_rate(a):
    return next((r for r in (2, 1) if "fps" in a and a["fps"] % r == 0), None)


def visible(a):
    """The points of a track annotation that can be seen, by time."""
    return [p for p in sorted(a["points"], key=lambda p: p["t"]) if not p.get("occluded")]


def track_frames(a, record, size, times, query=None):
    """What of a track annotation is asked for -> {seconds of the clip, to a tenth: {id: (x, y) in 0..1}}. size: (width, height), the scale
    of pixels; times: of the frames shown (None: all that are annotated); query: the point it starts from, behind which all lies."""
    seen, rate, mode = visible(a), track_rate(a), track_mode(a, record)
    if query:
        seen = [p for p in seen if p["id"] == query["id"] and p["t"] > query["t"]]

    def shown(t):
        """Is a second of the clip on the grid of the rate asked for, and of a frame that is shown? To 0.01 s, as in Molmo2."""
        on_grid = not rate or a["fps"] == rate or abs(t - round(t * rate) / rate) <= 0.01
        return on_grid and (times is None or any(abs(t - other) <= 0.01 for other in times))

    seen = [p for p in seen if shown(since_start(p["t"], record))]
    if mode == "start_end":
        first, last = {p["id"]: p["t"] for p in reversed(seen)}, {p["id"]: p["t"] for p in seen}
        seen = [p for p in seen if p["t"] in (first[p["id"]], last[p["id"]])]
    frames = {}
    for p in seen:                                                        # two frames within a tenth of a second read as one: the first
        frames.setdefault(seconds(p["t"], record), {}).setdefault(p["id"], unit(p, a, size))
    return frames
