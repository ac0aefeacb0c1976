"""Converts files of other formats to files of records: `python -m tools.convert`.

rows      a file or a folder -> its entries (in code: rows), and the format of each
chats     an entry with messages (ShareGPT, LLaVA, OpenAI, Hugging Face) -> a record
tables    an entry with a question and its answer, or with a caption -> messages
boxes     COCO, LVIS, LabelMe, YOLO -> records
paths     changes the paths of media for the new file, and selects held-out records
subtitles finds the subtitle file of a video
turn      turns coordinates in the same way as EXIF turns the images
"""
