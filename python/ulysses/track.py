"""Sends the metrics.jsonl of a run of ulysses-mpi to Weights & Biases or MLflow.

    python -m ulysses.track out --to wandb --project long-context
    python -m ulysses.track out --to mlflow --project long-context --once

`follow` reads the file as the run writes it, and gives each record to a tracker: `WandbTracker` or
`MlflowTracker`, or an object with the same three methods. The trackers import their packages when
they are made; this package does not depend on them.

A run and the runs that resume it have one identifier in metrics.jsonl, and are one run of the
tracker. What was sent is remembered in a file beside metrics.jsonl, so a tailer that is started
again sends the rest. A resumed run repeats steps after its checkpoint; those that were sent before
are not sent again.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

METRICS = "metrics.jsonl"


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record under its flat keys, without `step` and `time`.

    A value that was NaN or Inf is null in the file and is left out.
    """
    kept: dict[str, float] = {}
    for key, value in record.items():
        if key in ("step", "time"):
            continue
        if isinstance(value, bool):
            kept[key] = float(value)
        elif isinstance(value, (int, float)):
            kept[key] = value
    return kept


def is_evaluation(record: dict[str, Any]) -> bool:
    """Reports whether a record is of an evaluation, and not of a step."""
    return "eval_tokens" in record


class Lines:
    """The complete lines of a file that grows, and that a resumed run replaces by a shorter one."""

    def __init__(self, path: os.PathLike[str] | str):
        self.path = pathlib.Path(path)
        self.offset = 0
        self.inode: int | None = None

    def read(self) -> Iterator[dict[str, Any]]:
        """Yields the records that were added since the last call; all of a replaced file."""
        try:
            f = open(self.path, "rb")
        except FileNotFoundError:
            return
        with f:
            state = os.fstat(f.fileno())
            if state.st_ino != self.inode or state.st_size < self.offset:
                self.inode, self.offset = state.st_ino, 0
            f.seek(self.offset)
            for line in f:
                if not line.endswith(b"\n"):  # it is being written
                    return
                self.offset += len(line)
                try:
                    record = json.loads(line)
                except ValueError:
                    continue  # a process was killed while it wrote the line
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    yield record


@dataclasses.dataclass
class Sent:
    """What was sent to a tracker."""

    run: str = ""  # identifier in metrics.jsonl
    id: str = ""  # of the run in the tracker
    step: int = 0  # the last step
    evaluation: int = 0  # step of the last evaluation of the run
    job: float = 0.0  # time of the last evaluation job

    def is_new(self, record: dict[str, Any]) -> bool:
        """Reports whether a record has not been sent."""
        step = record["step"]
        if not is_evaluation(record):
            return step > self.step
        return self._when(record) > self.job if step == 0 else step > self.evaluation

    def note(self, record: dict[str, Any]) -> None:
        """Notes a record as sent."""
        if not is_evaluation(record):
            self.step = record["step"]
        elif record["step"] == 0:
            self.job = self._when(record)
        else:
            self.evaluation = record["step"]

    @staticmethod
    def _when(record: dict[str, Any]) -> float:
        return float(record.get("time") or 0.0)


class StateError(ValueError):
    """The file that remembers what was sent is damaged."""


class WandbTracker:
    """Sends records to Weights & Biases. `module` stands for the package in tests."""

    name = "wandb"

    def __init__(self, project: str | None = None, name: str | None = None, module: Any = None):
        self.module = importlib.import_module("wandb") if module is None else module
        self.project, self.title = project, name
        self.run: Any = None

    def open(self, run: str, id: str) -> str:
        """Opens the run with an identifier, and returns the tracker's identifier."""
        self.run = self.module.init(
            project=self.project, name=self.title, id=id or run, resume="allow"
        )
        # W&B's own counter of steps refuses steps that come again.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        return id or run

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log({**values, "step": step})

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()
        self.run = None


class MlflowTracker:
    """Sends records to MLflow. `module` stands for the package in tests."""

    name = "mlflow"

    def __init__(self, project: str | None = None, name: str | None = None, module: Any = None):
        self.module = importlib.import_module("mlflow") if module is None else module
        self.title = name
        if project is not None:
            self.module.set_experiment(project)

    def open(self, run: str, id: str) -> str:
        """Opens the run with an identifier, and returns the tracker's identifier."""
        if id:
            return self.module.start_run(run_id=id).info.run_id
        return self.module.start_run(run_name=self.title, tags={"ulysses.run": run}).info.run_id

    def log(self, step: int, values: dict[str, float]) -> None:
        self.module.log_metrics(values, step=step)

    def close(self) -> None:
        self.module.end_run()


def _read_state(path: pathlib.Path) -> Sent:
    try:
        return Sent(**json.loads(path.read_text()))
    except FileNotFoundError:
        return Sent()
    except (ValueError, TypeError) as e:
        raise StateError(f"{path}: not the state of a tailer ({e}); remove it to send all") from e


def _write_state(path: pathlib.Path, sent: Sent) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(dataclasses.asdict(sent)))
    os.replace(part, path)


def follow(
    folder: os.PathLike[str] | str,
    tracker: Any,
    *,
    once: bool = False,
    idle: float | None = None,
    every: float = 5.0,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Sends the records of `folder`/metrics.jsonl to a tracker, and returns their number.

    It returns after the records that the file has (`once`), or after `idle` seconds without a new
    one (None = never). It looks for new ones each `every` seconds. `folder` is output.dir of a run,
    which may not have begun.
    """
    folder = pathlib.Path(folder)
    state = folder / f".track-{tracker.name}.json"
    lines, sent, opened = Lines(folder / METRICS), Sent(), False
    if folder.is_dir():
        sent = _read_state(state)
    count, saved, quiet = 0, 0, 0.0
    try:
        while True:
            for record in lines.read():
                run = str(record.get("run", ""))
                if run != sent.run:  # output.overwrite: another run
                    if opened:
                        tracker.close()
                    sent, opened = Sent(run=run), False
                values = numbers(record)
                if not values or not sent.is_new(record):
                    continue
                if not opened:
                    sent.id, opened = tracker.open(run, sent.id), True
                    _write_state(state, sent)
                tracker.log(record["step"], values)
                sent.note(record)
                count += 1
            if count > saved:
                _write_state(state, sent)
                saved, quiet = count, 0.0
            if once or (idle is not None and quiet >= idle):
                return count
            sleep(every)
            quiet += every
    finally:
        if count > saved:  # a tracker has failed: the record is sent again later
            _write_state(state, sent)
        if opened:
            tracker.close()


def main(args: list[str] | None = None) -> int:
    """The command line: python -m ulysses.track."""
    parser = argparse.ArgumentParser(
        prog="python -m ulysses.track", description="Sends metrics.jsonl to a tracker."
    )
    parser.add_argument("folder", help="output.dir of a run")
    parser.add_argument("--to", required=True, choices=("wandb", "mlflow"))
    parser.add_argument("--project", help="project of W&B, experiment of MLflow")
    parser.add_argument("--name", help="name of the run")
    parser.add_argument("--once", action="store_true", help="send what is there, and end")
    parser.add_argument(
        "--idle", type=float, metavar="S", help="end after S seconds without a new record"
    )
    given = parser.parse_args(args)
    trackers: dict[str, Any] = {"wandb": WandbTracker, "mlflow": MlflowTracker}
    try:
        tracker = trackers[given.to](project=given.project, name=given.name)
        n = follow(given.folder, tracker, once=given.once, idle=given.idle)
    except KeyboardInterrupt:
        return 0
    except ImportError as e:
        return _failed(f"{e}; install it with pip install {given.to}")
    except StateError as e:
        return _failed(str(e))
    except Exception as e:  # the packages of trackers have errors of many classes
        why = " ".join(f"{type(e).__name__}: {e}".split())  # one line
        return _failed(f"sending to {given.to}: {why}; run the command again to send the rest")
    print(f"{n} records sent to {given.to}")
    return 0


def _failed(message: str) -> int:
    """Prints the error of the command, and returns its exit code."""
    print(f"ulysses.track: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
