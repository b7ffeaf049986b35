"""The program that test_trainer.py starts: the Trainer on 1, 2 and 4 ranks of torch.distributed.

Each run trains a tiny model for five steps of SGD with padded batches, two micro-batches a step and
an evaluation. The results of the runs with sequence parallelism are compared with the run of
transformers' own Trainer on one rank in float64. The ranks are forked after the imports.
"""

import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback

import numpy as np
import torch
import torch.distributed as dist
import transformers
import ulysses
import ulysses.trainer
from families import VOCAB, build, float64, own_recurrence
from reference import error

STEPS, BATCH, MICRO = 5, 4, 2  # steps, sequences of a micro-batch, micro-batches of a step


class Data(torch.utils.data.Dataset):
    """Sequences of 9 to 19 tokens. Of every third, only the last two tokens have labels, and of
    every fifth, none has."""

    def __init__(self, n):
        g = torch.Generator().manual_seed(n)
        self.rows = [torch.randint(1, VOCAB, (9 + 7 * i % 11,), generator=g) for i in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        labels = self.rows[i].clone()
        labels[: len(labels) - 2 if i % 3 == 0 else len(labels) if i % 5 == 0 else 0] = -100
        return {"input_ids": self.rows[i], "labels": labels}


def padded(rows):
    """Pads the sequences of a batch on the right."""
    n = max(len(r["input_ids"]) for r in rows)
    batch = {"input_ids": [], "labels": [], "attention_mask": []}
    for r in rows:
        more = n - len(r["input_ids"])
        pad = torch.nn.functional.pad
        batch["input_ids"].append(pad(r["input_ids"], (0, more)))
        batch["labels"].append(pad(r["labels"], (0, more), value=-100))
        batch["attention_mask"].append(pad(torch.ones_like(r["input_ids"]), (0, more)))
    return {k: torch.stack(v) for k, v in batch.items()}


def packed(rows):
    """Joins the sequences of a batch into one, without padding."""
    labels = [r["labels"].clone() for r in rows]
    for x in labels:
        x[0] = -100
    return {
        "input_ids": torch.cat([r["input_ids"] for r in rows])[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(r["input_ids"])) for r in rows])[None],
    }


def arguments(folder, batch, **more):
    return transformers.TrainingArguments(
        **{
            **dict(
                output_dir=folder,
                use_cpu=True,
                per_device_train_batch_size=batch,
                per_device_eval_batch_size=batch,
                gradient_accumulation_steps=MICRO,
                max_steps=STEPS,
                logging_steps=1,
                learning_rate=0.02,
                optim="sgd",
                max_grad_norm=1.0,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                ddp_backend="gloo" if "RANK" in os.environ else None,
                seed=7,
            ),
            **more,
        }
    )


def metrics(prediction):
    """Returns a number that depends on all logits and labels of the evaluation."""
    real = prediction.label_ids != -100
    return {"sum": float(np.abs(prediction.predictions[real]).mean()), "real": int(real.sum())}


def train(cls, family, folder, world, sp, collate=padded, **options):
    """Returns (losses, gradient norms, weights, metrics of the evaluation) of a run."""
    transformers.set_seed(7)
    groups = world // sp
    trainer = cls(
        model=build(family, "sdpa"),
        args=arguments(folder, BATCH // groups, per_device_eval_batch_size=BATCH // world),
        train_dataset=Data(BATCH * MICRO * STEPS),
        eval_dataset=Data(7),  # the last batches have repeated sequences on several ranks
        data_collator=collate,
        compute_metrics=metrics,
        **options,
    )
    assert trainer.get_total_train_batch_size(trainer.args) == BATCH * MICRO
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert len(trainer.get_train_dataloader()) == MICRO * STEPS
    logs = [x for x in trainer.state.log_history if "loss" in x]
    return {
        "loss": [x["loss"] for x in logs],
        "grad_norm": [x["grad_norm"] for x in logs],
        "lr": [x["learning_rate"] for x in logs],
        "weights": {n: p.detach() for n, p in trainer.model.named_parameters()},
        "flos": trainer.state.total_flos,
        "eval": [[x[k] for k in ("eval_loss", "eval_sum", "eval_real")] for x in (before, after)],
    }


RUNS = [  # family, collator, ranks, ranks of a sequence, evaluation
    ("llama", padded, 2, 2, "sharded"),
    ("llama", padded, 4, 2, "sharded"),
    ("llama", padded, 4, 4, "whole"),
    ("qwen3.5 text", padded, 2, 2, "whole"),
    ("qwen3.5 text", padded, 4, 4, "sharded"),
    ("llama", packed, 2, 2, None),
]


def check(family, collate, folder, world, sp, evaluation, want):
    """Compares a run on several ranks with transformers' Trainer on one rank."""
    if collate is packed:
        found = train_only(ulysses.trainer.Trainer, family, folder, collate, world, sp)
    else:
        found = train(
            ulysses.trainer.Trainer,
            family,
            folder,
            world,
            sp,
            collate,
            sequence_parallel_size=sp,
            evaluation=evaluation,
        )
    for name in want:
        if name == "flos" and world > sp:
            continue  # groups have other padding than one rank
        if name == "weights":
            for parameter, w in want[name].items():
                e = error(found[name][parameter], w)
                assert e < 1e-5, (family, world, sp, parameter, e)
        else:
            e = error(np.array(found[name]), np.array(want[name]))
            assert e < 1e-5, (family, world, sp, name, e, found[name], want[name])


def train_only(cls, family, folder, collate, world, sp, **options):
    """Returns losses and weights of a run without evaluation."""
    transformers.set_seed(7)
    if sp > 1:
        options["sequence_parallel_size"] = sp
    trainer = cls(
        model=build(family, "sdpa"),
        args=arguments(folder, BATCH // (world // sp)),
        train_dataset=Data(BATCH * MICRO * STEPS),
        data_collator=collate,
        **options,
    )
    trainer.train()
    return {
        "loss": [x["loss"] for x in trainer.state.log_history if "loss" in x],
        "weights": {n: p.detach() for n, p in trainer.model.named_parameters()},
    }


def refusals(folder, sp):
    """What does not work with shards is refused by name, on every rank."""
    import peft

    model = build("llama", "sdpa")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    prompts = peft.get_peft_model(build("llama", "sdpa"), config)
    classifier = transformers.LlamaForSequenceClassification(model.config)

    def refused(words, *, call=None, cls=ulysses.Unsupported, more=None, **options):
        try:
            made = ulysses.trainer.Trainer(
                model=options.pop("model", model),
                args=arguments(folder, 2, **(more or {})),
                train_dataset=options.pop("data", Data(8)),
                data_collator=options.pop("collate", padded),
                **options,
            )
            if call:
                call(made)
        except cls as e:
            assert words in str(e), (words, str(e))
        else:
            raise AssertionError(f"{words} was not refused")

    refused("torch_compile=True", more=dict(torch_compile=True))
    refused("label_smoothing_factor=0.1", more=dict(label_smoothing_factor=0.1))
    refused("compute_loss_func", compute_loss_func=lambda *a, **k: 0)
    refused("auto_find_batch_size", more=dict(auto_find_batch_size=True))
    refused("neftune_noise_alpha=5", more=dict(neftune_noise_alpha=5.0))
    refused("prompt learning", model=prompts)
    refused("ForSequenceClassificationLoss", model=classifier)
    eager = build("llama", "eager")
    refused("attn_implementation='eager'", model=eager, evaluation="whole")
    refused("give a divisor", cls=ValueError, sequence_parallel_size=3)
    refused("evaluation 'none'", cls=ValueError, evaluation="none")

    def holes(rows):
        batch = padded(rows)
        batch["attention_mask"][1, 2] = 0
        return batch

    words = "hides tokens in the middle of sequence 1, before token 3"
    refused(words, collate=holes, call=lambda made: made.train())

    def other(rows):
        batch = padded(rows)
        batch["input_ids"][0, 0] = dist.get_rank()
        return batch

    refused("input_ids", cls=ulysses.InvalidArgument, collate=other, call=lambda made: made.train())


class NoLabels(Data):
    def __getitem__(self, i):
        return {**super().__getitem__(i), "labels": torch.full_like(self.rows[i], -100)}


def corners(folder, sp):
    """Adapters; generation, which needs one rank; a step without labels, which changes nothing."""
    import peft

    def run(model, data):
        trainer = ulysses.trainer.Trainer(
            model=model,
            args=arguments(folder, 2, max_steps=2),
            train_dataset=data,
            data_collator=padded,
        )
        trainer.train()
        return trainer.model

    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = run(peft.get_peft_model(build("llama", "sdpa"), adapters), Data(8))
    moved = [p for n, p in model.named_parameters() if "lora_B" in n]
    assert moved and all(float(p.abs().max()) > 0 for p in moved)
    try:
        model.eval().generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2)
        raise AssertionError("generation was not refused")
    except ulysses.Unsupported as e:
        assert f"a key-value cache on {sp} ranks" in str(e), e
    model = run(build("qwen3-moe", "sdpa"), NoLabels(8))
    for a, b in zip(model.parameters(), build("qwen3-moe").parameters()):
        assert torch.equal(a, b)


class OneLabel(Data):
    """Sequences of which only the first has a label, its last token."""

    def __getitem__(self, i):
        labels = torch.full_like(self.rows[i], -100)
        if i == 0:
            labels[-1] = self.rows[0][-1]
        return {"input_ids": self.rows[i], "labels": labels}


def several(folder, sp):
    """Fewer labels than ranks; a model of model_init; a second Trainer; sequences by length."""
    import peft

    def trainer(data, model=None, more=None, **options):
        transformers.set_seed(7)
        return ulysses.trainer.Trainer(
            model=model,
            args=arguments(folder, BATCH, **(more or {})),
            train_dataset=data,
            eval_dataset=Data(BATCH * sp),
            data_collator=padded,
            **options,
        )

    data, first = OneLabel(BATCH * MICRO), build("llama", "sdpa")
    want = first(**padded([data[0]])).loss
    want.backward()
    for average in (True, False):
        step = dict(max_steps=1, max_grad_norm=0.0, average_tokens_across_devices=average)
        found = trainer(data, build("llama", "sdpa"), step)
        if average:
            loss = found.evaluate(OneLabel(BATCH * sp))["eval_loss"]
            assert abs(loss - want.item()) < 1e-5, (loss, want)
        found.train()
        moved = dict(found.model.named_parameters())
        for name, w in first.named_parameters():
            e = error(moved[name].detach(), w.detach() - 0.02 * w.grad)
            assert e < 1e-6, (average, name, e)

    data = Data(BATCH * MICRO * 2)
    given = trainer(data, build("llama", "sdpa"), dict(max_steps=2))
    made = trainer(data, None, dict(max_steps=2), model_init=lambda: build("llama", "sdpa"))
    for x in (given, made):
        x.train()
    for a, b in zip(given.model.parameters(), made.model.parameters()):
        assert error(b.detach(), a.detach()) < 1e-6

    again = trainer(data, given.model, evaluation="whole")
    losses = [x.evaluate()["eval_loss"] for x in (trainer(data, made.model), again)]
    assert abs(losses[0] - losses[1]) < 1e-5, losses

    def refused(call):
        try:
            call()
            raise AssertionError("an attention that this Trainer has not set was not refused")
        except ulysses.InvalidArgument as e:
            assert "make another Trainer" in str(e), e

    refused(given.evaluate)
    given.model.set_attn_implementation("sdpa")
    refused(again.train)
    refused(again.evaluate)

    # Adapters' dropout draws a number for each token, and ranks have different numbers of tokens.
    dropout = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    by_length = dict(train_sampling_strategy="group_by_length", num_train_epochs=3, max_steps=-1)
    trainer(data, peft.get_peft_model(build("llama", "sdpa"), dropout), by_length).train()


def checkpoints(folder, sp):
    """A run that is resumed from a checkpoint equals one that was not interrupted."""

    def run(steps, resume=None):
        transformers.set_seed(7)
        trainer = ulysses.trainer.Trainer(
            model=build("llama", "sdpa"),
            args=arguments(folder, BATCH, save_strategy="steps", save_steps=3, max_steps=STEPS),
            train_dataset=Data(BATCH * MICRO * STEPS),
            data_collator=padded,
            sequence_parallel_size=sp,
        )
        trainer.train(resume_from_checkpoint=resume)
        return {n: p.detach() for n, p in trainer.model.named_parameters()}

    whole = run(STEPS)
    again = run(STEPS, os.path.join(folder, "checkpoint-3"))
    for name in whole:
        assert error(again[name], whole[name]) < 1e-6, name


def accelerate_loop(folder, sp):
    """A training loop with Accelerate has the gradients of one rank."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    state = ulysses.sequence_groups(sp)
    name = "ulysses_accelerate"
    ulysses.register_transformers(name, state.context)
    model, plain = build("llama", "sdpa"), build("llama", "sdpa")
    model.set_attn_implementation(name)
    data = Data(12)
    with ulysses.trainer.same_data(accelerator, state):
        loader = accelerator.prepare(
            torch.utils.data.DataLoader(data, batch_size=3, collate_fn=padded)
        )
    model = accelerator.prepare(model)
    groups = dist.get_world_size() // sp
    assert len(loader) == 4 // groups, len(loader)
    for step, batch in enumerate(loader):
        x = ulysses.local_batch(batch, context=state.context)
        y = x.pop("shift_labels")
        mean = model(**x, labels=y, shift_labels=y).loss
        loss = ulysses.reduce_sequence_parallel_loss(mean, (y != -100).sum(), context=state.context)
        accelerator.backward(loss)
        for group in range(groups):
            lo = 3 * (step * groups + group)
            whole = padded([data[i] for i in range(lo, lo + 3)])
            (plain(**whole).loss / groups).backward()
    found = dict(accelerator.unwrap_model(model).named_parameters())
    for parameter, p in plain.named_parameters():
        e = error(found[parameter].grad, p.grad)
        assert e < 2e-5, (parameter, e)


def another_world(folder, sp):
    """Groups belong to the process group that is initialized, not to one before."""
    rank, worlds = int(os.environ["RANK"]), []
    for i in range(2):
        store, mine = f"file://{folder}/store{i}", (rank + i) % sp  # the ranks have another order
        dist.init_process_group("gloo", init_method=store, rank=mine, world_size=sp)
        state, mesh = ulysses.sequence_groups(sp), ulysses.trainer._mesh(sp)
        assert (state.context.rank, state.get_sequence_parallel_rank()) == (mine, mine)
        assert state is ulysses.sequence_groups(sp) and mesh is ulysses.trainer._mesh(sp)
        assert mesh.get_local_rank("cp") == mine
        worlds.append((state, mesh))
        dist.destroy_process_group()
    assert worlds[0][1] is not worlds[1][1]


def child(rank, world, port, body, args):
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
    )
    if world == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
    torch.set_num_threads(1)
    try:
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
            body(*args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without waiting for the other ranks


def launch(world, body, *args):
    """Runs body(*args) on ranks that are forked, and ends the program if one of them fails."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=child, args=(r, world, port, body, args)) for r in range(world)]
    for p in ranks:
        p.start()
    while any(p.exitcode is None for p in ranks) and not any(p.exitcode for p in ranks):
        for p in ranks:
            p.join(0.1)
    failed = [r for r, p in enumerate(ranks) if p.exitcode]
    for p in ranks:
        p.kill()
    if failed:
        sys.exit(f"{body.__name__} on {world} ranks: ranks {failed} failed")


def plain(family, collate, folder):
    """Runs transformers' Trainer on one rank in float64."""
    run = train if collate is padded else train_only
    arguments = (1, 1, collate) if run is train else (collate, 1, 1)
    with float64(), own_recurrence():
        found = run(Double, family, folder, *arguments)
    torch.save(found, f"{folder}/plain.pt")


class Double(transformers.Trainer):
    """The Trainer of transformers, of a model in float64."""

    def __init__(self, model, **options):
        super().__init__(model.double(), **options)


def main():
    only = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        wanted = {}
        for family, collate, world, sp, evaluation in RUNS if not only or "train" in only else ():
            if (family, collate) not in wanted:
                launch(1, plain, family, collate, folder)
                wanted[family, collate] = torch.load(f"{folder}/plain.pt")
            want = wanted[family, collate]
            launch(world, check, family, collate, folder, world, sp, evaluation, want)
            print(family, collate.__name__, world, sp, evaluation, "ok", flush=True)
        for body, world, sp in (
            (refusals, 2, 2),
            (corners, 2, 2),
            (several, 2, 2),
            (checkpoints, 2, 2),
            (accelerate_loop, 4, 2),
            (another_world, 2, 2),
        ):
            if not only or body.__name__ in only:
                launch(world, body, folder, sp)
                print(body.__name__, "ok", flush=True)


if __name__ == "__main__":
    main()
