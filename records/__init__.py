"""A user's file as a sequence of records.

errors      exceptions for mistakes in data, and warnings
check       checks the fields of a record, by tables (docs/records.md)
parse       brings records into one form, and checks the rules between their fields
reader      Records: reads a file as a sequence, and the media of its records
media       images and videos: sizes from headers, and pixels
video       reads video files with ffmpeg: timestamps, and the frames at given times
subtitles   subtitle files as entries with times in seconds
visual      the visual input of a record: frame times and crops
mixture     chooses the record that comes next, and its file
"""
