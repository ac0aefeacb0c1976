"""Writes the log of a run for TensorBoard, and follows the run while it trains.

    python -m tools.tensorboard runs/five --once

Each number in a line of RUN/log.jsonl becomes a scalar in RUN/tensorboard/ with a name such as
loss, lr/vit or eval/point_f1. If a resumed run repeats a step, the later line counts. The command
deletes nothing. If you start it again, TensorBoard ignores the files of the earlier start.
"""

import threading
import time
from pathlib import Path

from records.errors import UserError, import_extra
from tools.command import make_parser, report_errors
from training.log import read_log

SECONDS = 5  # time between two reads of log.jsonl


def write_scalars(log, folder, once):
    """Writes the numbers of log.jsonl to a folder for TensorBoard. Without `once` it continues with
    the lines that the run adds."""
    event_pb2 = import_extra("tensorboard.compat.proto.event_pb2")
    tensorboard = import_extra("torch.utils.tensorboard")
    print(f"writes the scalars of {log} to {folder}; show them with:\n"
          f"    tensorboard --logdir {folder.parent}", flush=True)
    # TensorBoard raises an error of its thread in this thread, too, where it is one sentence
    threading.excepthook = lambda error: None
    n_read = last = 0  # n_read: lines read so far; last: the step of the last line
    # with purge_step=0, TensorBoard ignores older files in the folder
    with tensorboard.SummaryWriter(folder, purge_step=0) as board:
        while True:
            lines = read_log(log)
            if len(lines) < n_read:
                raise UserError(f"{log} has fewer lines than before; start this command again")
            for line in lines[n_read:]:
                if {"step", "loss"} <= line.keys():
                    step = line.pop("step")
                    if step <= last:  # the run was resumed; purge this step and later steps
                        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                        board.file_writer.add_event(event_pb2.Event(session_log=start), step)
                    last = step
                    add_scalars(board, line, step)
                elif {"step", "eval"} <= line.keys():
                    add_scalars(board, {"eval": line["eval"]}, line["step"])
            board.flush()
            if once:
                return
            n_read = len(lines)
            time.sleep(SECONDS)


def add_scalars(board, values, step, prefix=""):
    """Adds the numbers of a log line as scalars. A number in a dict gets the name "dict/number"."""
    for name, value in values.items():
        if isinstance(value, dict):
            add_scalars(board, value, step, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            board.add_scalar(prefix + name, value, step)


@report_errors
def main(argv=None):
    parser = make_parser("tensorboard", __doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, --out of train.py")
    parser.add_argument("--once", action="store_true", help=(
        "write the present lines and end (default: follow the log until Ctrl-C)"))
    args = parser.parse_args(argv)
    log = args.run / "log.jsonl"
    if not log.is_file():
        raise UserError(f"{log}: no such file; RUN is a run directory, --out of train.py")
    write_scalars(log, args.run / "tensorboard", args.once)


if __name__ == "__main__":
    main()
