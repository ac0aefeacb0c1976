"""Files of other formats as files of records: `python -m tools.convert`.

rows      a file or a folder -> its rows, and the format of each
chats     a row of ShareGPT, LLaVA, OpenAI or Hugging Face messages -> a record
tables    a row with a question and its answer, or with a caption -> such a chat
boxes     COCO, LVIS, LabelMe, YOLO -> records
paths     paths of media in a new file, and which records are held out
turn      coordinates of images that EXIF turns
"""
