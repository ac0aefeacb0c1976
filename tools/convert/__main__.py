"""Converts files of other formats, published sets and benchmarks to a file of records.

    python -m tools.convert tests/conformance/sharegpt.json runs/chats.jsonl \\
        --media tests/media

in      a .jsonl, .csv, .tsv or .parquet file with one entry per line, or a .json file with an
        array (or an object) of entries:
          chats       ShareGPT, LLaVA, OpenAI, Hugging Face, ms-swift
          questions   question and answer; instruction and output (alpaca); query and response
          choices     question, options (or columns A, B, ..) and answer
          captions    image or file_name, with text or caption
          records     entries that are records already
        a .json file in COCO's format (coco), also of Roboflow and LVIS: boxes, polygons, captions
        a .json file of Label Studio (label-studio): boxes, polygons, points, choices, texts
        a table with a line for each box (csv-boxes): image, label, xmin, ymin, xmax, ymax
        a folder with
          labelme     .json files of LabelMe: boxes, polygons, points
          voc         .xml files of Pascal VOC: boxes
          yolo        .txt files, with data.yaml (needs PyYAML) or classes.txt
          mot         seqinfo.ini, gt/gt.txt and images: tracks
          captions    metadata.jsonl or metadata.csv: an imagefolder
        files of a published set or benchmark, or a folder of them, with --as
out     OUT, one record per line; its paths are relative to the folder where training finds media
        OUT.urls.txt    of a published set: "URL TAB path in the media folder" per line, for you
                        to download, since this command opens no network connection
        OUT.masks.npz   masks of a benchmark, for --masks of tools.evaluate
stdout  {"rows":, "records":, "held_out":, "skipped": {kind: n}}; "rows" counts the entries

An entry that cannot become a record is skipped, and the reason is printed. docs/convert.md and
docs/records.md describe the formats.

Exit status: 0 if records were written; 1 if nothing was written, for example because no entry can
become a record or no image was found; 2 after a mistake of the user, such as a missing file.
"""

import json
import sys

from evaluation.pictures import draw_records
from records.errors import RunError, draft, warn
from records.reader import Records
from tools.command import report_errors
from tools.convert.flags import parse
from tools.convert.report import Report
from tools.convert.template import write_template
from tools.convert.write import write


@report_errors
def main(argv=None):
    args = parse(argv, __doc__)
    if args.template:
        print(json.dumps({"files": write_template(args.sources[0], args.out)}))
        return 0
    report = Report(args)
    try:
        counts = write(args, report)
    except RunError as error:  # the last line is printed, too
        warn(str(error))
        counts = [0] * len(args.outs)
    is_read = any(counts) and not (args.urls and not args.draw)
    records = [Records(path) for path in args.outs if is_read]  # prints warnings of training
    if args.draw and records:
        picture = draw_records(records[0], args.draw)
        if picture:
            try:
                with draft(args.drawing) as path:
                    picture.save(path)
            except OSError as error:
                raise RunError(f"{args.drawing} is not written: {error}; {args.out} is complete"
                               ) from None
            warn(f"{args.drawing} shows the first images or videos")
        else:
            warn(f"{args.drawing} is not written: {args.out} has no image and no video to draw")
    held_out = {"held_out": counts[1]} if args.hold_out else {}
    print(json.dumps({"rows": report.read.total(), "records": counts[0], **held_out,
                      "skipped": dict(sorted(report.skipped.items()))}))
    return int(not any(counts))


if __name__ == "__main__":
    sys.exit(main())
