"""A user's file as a sequence of records.

errors      what goes wrong with data, and what it costs
check       the rules of a record (docs/records.md)
reader      Records: a file as a sequence, and the media of its records
media       images and videos: sizes from headers, and pixels
video       video files by ffmpeg: timestamps, and the frames on display at given seconds
visual      the visual input of a record: frame times and crops
mixture     which record of which file comes next
"""
