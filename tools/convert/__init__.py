"""Files of other formats as files of records: `python -m tools.convert`.

rows      a file -> its rows
chats     a row of ShareGPT, LLaVA, OpenAI or Hugging Face messages -> a record
boxes     annotations in COCO's format -> records
"""
