"""A user's file as a sequence of records.

errors      what goes wrong with data, and what it costs
check       the fields of a record, by tables (docs/records.md)
parse       records in one form, and the rules between their fields
reader      Records: a file as a sequence, and the media of its records
media       images and videos: sizes from headers, and pixels
video       video files by ffmpeg: timestamps, and the frames on display at given seconds
visual      the visual input of a record: frame times and crops
mixture     which record of which file comes next
"""
