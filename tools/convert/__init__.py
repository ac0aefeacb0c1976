"""Converts files of other formats and published sets to records: `python -m tools.convert`.

rows      a file -> its entries (in code: rows), each with its place
layout    what a layout is: the columns of a row, and a function that makes records of it
layouts   all layouts, how they are recognised, and which files of a folder are read
entries   all files -> what the layouts make of their rows
report    what was read, what was skipped and why, and which fields were not used
write     checks the records, merges those of one image, and writes all files
media     finds images and videos, and writes images of tables to files
make      cells of rows -> annotations
chats     an entry with messages (ShareGPT, LLaVA, OpenAI, Hugging Face) -> a record
tables    an entry with a question and its answer, or with a caption -> messages
choices   an entry with a question and options -> a record
boxes     COCO, LVIS, LabelMe -> records
masks     masks of COCO -> boxes or points
studio    Label Studio -> records
tracks    MOT -> records
negatives adds labels that an image does not show
template  a folder of photographs -> a table to fill in
box_rows  Pascal VOC, and tables with a line for each box -> records
yolo      YOLO -> records
sets      the layouts of published sets, with the functions in images and videos
benchmarks: the layouts of published benchmarks
paths     changes the paths of media for the new file, and selects held-out records
subtitles: finds the subtitle file of a video
turn      turns coordinates in the same way as EXIF turns the images
flags     the flags of the command
"""
