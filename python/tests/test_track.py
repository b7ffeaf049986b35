"""ulysses.track sends metrics.jsonl to W&B and MLflow, which are fakes here."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

from ulysses import track


class Wandb:
    """Records the calls of the functions of wandb that the tracker uses."""

    def __init__(self):
        self.inits, self.metrics, self.logged, self.finished = [], [], [], 0

    def init(self, **options):
        self.inits.append(options)
        return self

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished += 1


class Mlflow:
    """Records the calls of the functions of mlflow that the tracker uses."""

    def __init__(self):
        self.experiment, self.starts, self.logged, self.ended = None, [], [], 0

    def set_experiment(self, name):
        self.experiment = name

    def start_run(self, **options):
        self.starts.append(options)
        id = options.get("run_id") or f"mlflow-{len(self.starts)}"
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=id))

    def log_metrics(self, values, step):
        self.logged.append((step, values))

    def end_run(self):
        self.ended += 1


def step(n, run="abc", **more):
    return {"run": run, "time": 100.0 + n, "step": n, "loss": 5.0 - n / 10, "lr": 1e-3, **more}


def evaluation(n, run="abc", **more):
    return {"run": run, "time": 100.5 + n, "step": n, "eval_loss": 4.0, "eval_tokens": 7, **more}


class Track(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.file = self.folder / "metrics.jsonl"

    def write(self, *records, tail=""):
        """Replaces the file, as a resumed run does."""
        part = self.folder / "new"
        part.write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
        part.replace(self.file)

    def append(self, text):
        with open(self.file, "a") as f:
            f.write(text)

    def test_wandb(self):
        wandb = Wandb()
        self.write(
            step(1, **{"phase_seconds/attention": 0.25, "skipped": True}),
            step(2, loss=None),
            evaluation(2, best=True, **{"eval_books_loss": 3.5, "eval_code_loss": None}),
            tail='{"run": "abc", "step": 3, "lo',
        )
        tracker = track.WandbTracker(project="p", name="n", module=wandb)
        self.assertEqual(track.follow(self.folder, tracker, once=True), 3)
        self.assertEqual(
            wandb.inits, [{"project": "p", "name": "n", "id": "abc", "resume": "allow"}]
        )
        self.assertEqual(wandb.metrics, [("step", None), ("*", "step")])
        self.assertEqual(
            wandb.logged,
            [
                {
                    "step": 1,
                    "loss": 4.9,
                    "lr": 1e-3,
                    "phase_seconds/attention": 0.25,
                    "skipped": 1.0,
                },
                {"step": 2, "lr": 1e-3},
                {
                    "step": 2,
                    "eval_loss": 4.0,
                    "eval_tokens": 7,
                    "best": 1.0,
                    "eval_books_loss": 3.5,
                },
            ],
        )
        self.assertEqual(wandb.finished, 1)

        # the line that was being written, and nothing twice
        self.append('ss": 4.7}\n')
        self.assertEqual(track.follow(self.folder, track.WandbTracker(module=wandb), once=True), 1)
        self.assertEqual(wandb.logged[-1], {"step": 3, "loss": 4.7})
        self.assertEqual(wandb.inits[-1]["id"], "abc")
        self.assertEqual(track.follow(self.folder, track.WandbTracker(module=wandb), once=True), 0)
        self.assertEqual(len(wandb.inits), 2)

    def test_mlflow(self):
        mlflow = Mlflow()
        self.write(step(1), evaluation(1), step(2))
        tracker = track.MlflowTracker(project="e", name="n", module=mlflow)
        self.assertEqual(track.follow(self.folder, tracker, once=True), 3)
        self.assertEqual(mlflow.experiment, "e")
        self.assertEqual(mlflow.starts, [{"run_name": "n", "tags": {"ulysses.run": "abc"}}])
        self.assertEqual(
            mlflow.logged,
            [
                (1, {"loss": 4.9, "lr": 1e-3}),
                (1, {"eval_loss": 4.0, "eval_tokens": 7}),
                (2, {"loss": 4.8, "lr": 1e-3}),
            ],
        )
        # a tailer that is started again continues the same run
        self.append(json.dumps(step(3)) + "\n")
        self.assertEqual(
            track.follow(self.folder, track.MlflowTracker(module=mlflow), once=True), 1
        )
        self.assertEqual(mlflow.starts[-1], {"run_id": "mlflow-1"})
        self.assertEqual(mlflow.ended, 2)

    def test_follow_a_run_that_resumes(self):
        """The file is written, replaced by a resumed run, and replaced by another run."""
        wandb, slept = Wandb(), []
        events = [
            lambda: self.write(step(1)),
            lambda: self.append(json.dumps(step(2)) + "\n" + json.dumps(step(3)) + "\n"),
            # resumed after step 1: step 2 and 3 come again, then 4
            lambda: self.write(step(1), step(2, lr=5.0), step(3), step(4)),
            lambda: self.append(json.dumps(evaluation(0)) + "\n"),
            lambda: self.append(json.dumps(evaluation(0, time=900.0)) + "\n"),
            lambda: self.write(step(1, run="def")),
        ]

        def sleep(seconds):
            slept.append(seconds)
            if events:
                events.pop(0)()

        tracker = track.WandbTracker(module=wandb)
        n = track.follow(self.folder, tracker, idle=10, every=5, sleep=sleep)
        self.assertEqual([x["step"] for x in wandb.logged], [1, 2, 3, 4, 0, 0, 1])
        self.assertEqual(n, 7)
        self.assertEqual([x["id"] for x in wandb.inits], ["abc", "def"])
        self.assertEqual(wandb.finished, 2)
        self.assertEqual(len(slept), 6 + 2)  # the last two without a record

    def test_tracker_that_fails(self):
        """The record is sent by the next tailer, to the same run."""
        mlflow = Mlflow()
        self.write(step(1), step(2), step(3))
        log, fails = mlflow.log_metrics, [2]

        def fail(values, step):
            if step in fails:
                fails.remove(step)
                raise OSError("no connection")
            log(values, step)

        mlflow.log_metrics = fail
        with self.assertRaisesRegex(OSError, "no connection"):
            track.follow(self.folder, track.MlflowTracker(module=mlflow), once=True)
        self.assertEqual(
            track.follow(self.folder, track.MlflowTracker(module=mlflow), once=True), 2
        )
        self.assertEqual([step for step, _ in mlflow.logged], [1, 2, 3])
        self.assertEqual(mlflow.starts[-1], {"run_id": "mlflow-1"})
        self.assertEqual(mlflow.ended, 2)

    def test_state_that_is_not_one(self):
        self.write(step(1))
        (self.folder / ".track-wandb.json").write_text("{")
        with self.assertRaisesRegex(ValueError, "not the state of a tailer"):
            track.follow(self.folder, track.WandbTracker(module=Wandb()), once=True)

    def test_command(self):
        self.write(step(1), step(2))
        out, wandb = io.StringIO(), Wandb()
        module = types.ModuleType("wandb")
        module.init = wandb.init
        with mock.patch.dict(sys.modules, {"wandb": module}), contextlib.redirect_stdout(out):
            self.assertEqual(track.main([str(self.folder), "--to", "wandb", "--once"]), 0)
        self.assertEqual(out.getvalue(), "2 records sent to wandb\n")
        err = io.StringIO()
        with mock.patch.dict(sys.modules, {"mlflow": None}), contextlib.redirect_stderr(err):
            self.assertEqual(track.main([str(self.folder), "--to", "mlflow", "--once"]), 1)
        self.assertIn("pip install mlflow", err.getvalue())

    def test_command_that_fails(self):
        """Errors of a tracker and of the file beside metrics.jsonl are one line."""

        def refuse(*args, **options):
            raise RuntimeError("no store\n  at http://127.0.0.1:1")

        self.write(step(1))
        for name in ("set_experiment", "start_run", "log_metrics"):
            mlflow, err = Mlflow(), io.StringIO()
            setattr(mlflow, name, refuse)
            with mock.patch.dict(sys.modules, {"mlflow": mlflow}), contextlib.redirect_stderr(err):
                command = [str(self.folder), "--to", "mlflow", "--once", "--project", "p"]
                self.assertEqual(track.main(command), 1)
            self.assertEqual(
                err.getvalue(),
                "ulysses.track: sending to mlflow: RuntimeError: no store at http://127.0.0.1:1; "
                "run the command again to send the rest\n",
            )
        (self.folder / ".track-wandb.json").write_text("{")
        err = io.StringIO()
        with mock.patch.dict(sys.modules, {"wandb": Wandb()}), contextlib.redirect_stderr(err):
            self.assertEqual(track.main([str(self.folder), "--to", "wandb", "--once"]), 1)
        self.assertRegex(err.getvalue(), r"^ulysses\.track: .*not the state of a tailer.*\n$")


if __name__ == "__main__":
    unittest.main()
